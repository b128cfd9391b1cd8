"""The bundled Megatron-Core trainer: the real megatron-core, built from a checkpoint's args alone.

    args = build.at_sizes(load.read_args(checkpoint), tp=2, pp=2)
    build.initialize(args)                      # process groups; torch.distributed must be up
    chunks = build.build(args)                  # one GPTModel per virtual stage of this rank
    load.load(chunks, args, checkpoint)         # torch_dist or torch, strictly
    logits = forward.logits(chunks, args, tokens)

`train` trains it; `reference` (transformers) and `worker` (this model) are the two sides of a
verdict, each a process of its own, compared at the places that `points` names. Nothing else of
mckpt imports this package; it needs torch and megatron-core. It runs under NCCL on GPUs and, with
the shims of cpu.py, under gloo without one.
"""
