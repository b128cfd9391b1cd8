"""The bundled Megatron-Core trainer: the real megatron-core, built from a checkpoint's args alone.

    args = build.at_sizes(load.read_args(checkpoint), tp=2, pp=2)
    build.initialize(args)                      # process groups; torch.distributed must be up
    chunks = build.build(args)                  # one model per virtual stage of this rank
    load.load(chunks, args, checkpoint)         # torch_dist or torch, strictly
    logits = forward.logits(chunks, args, tokens)

`train` trains the model. `reference` (transformers) and `worker` (this model) are the two sides of
a verdict. Each is a process of its own, and they are compared at the places in `points`. No other
module of mckpt imports this package, which requires torch and megatron-core. It runs under NCCL on
GPUs and, with the patches of `cpu`, under gloo without a GPU.
"""
