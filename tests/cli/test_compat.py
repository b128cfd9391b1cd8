"""`mckpt compat`: command lines of other converters, as their documentation writes them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from mckpt.cli import cli
from mckpt.cli.compat import read
from tests.helpers.commands import good, mckpt, refused

SLIME_QWEN3_4B = (
    "--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32"
    " --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings"
    " --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000"
    " --vocab-size 151936 --kv-channels 128 --qk-layernorm"
)
LINES = [
    (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 python tools/checkpoint/convert.py --bf16 --model-type GPT"
        " --loader llama_mistral --saver mcore --target-tensor-parallel-size 8"
        " --checkpoint-type hf --load-dir HF --save-dir OUT --tokenizer-model HF"
        " --saver-transformer-impl transformer_engine --model-size yi-34B"
        " --make-vocab-size-divisible-by 1",
        "mckpt hf-to-megatron HF OUT --tp 8 --transformer-impl transformer_engine"
        " --make-vocab-size-divisible-by 1 --dtype bf16 --format torch",
    ),
    (
        "python tools/checkpoint/convert.py --model-type GPT --loader loader_mixtral_hf"
        " --saver mcore --target-tensor-parallel-size 1 --target-pipeline-parallel-size 4"
        " --target-expert-parallel-size 8 --load-dir HF --save-dir OUT --tokenizer-model T",
        "mckpt hf-to-megatron HF OUT --tp 1 --pp 4 --ep 8 --transformer-impl transformer_engine"
        " --format torch",
    ),
    (
        "python /opt/Megatron-LM/tools/checkpoint/convert.py --model-type=GPT --loader=core"
        " --saver=core --load-dir=A --save-dir=B --target-tensor-parallel-size=4"
        " --true-vocab-size=50257",
        "mckpt reshard A B --tp 4 --vocab-size 50257 --transformer-impl transformer_engine --ep 1"
        " --target-format torch --no-optimizer --target-vpp 1",
    ),
    (
        "uv run python examples/conversion/convert_checkpoints.py import --hf-model ./local_model"
        " --megatron-path ./out --torch-dtype bfloat16 --device-map auto",
        "mckpt hf-to-megatron ./local_model ./out --dtype bf16 --etp 1 --run-config",
    ),
    (
        "./scripts/conversion/convert.sh import --executor slurm --device gpu --nodes 1"
        " --gpus-per-node 8 --account A --partition P --time 01:00:00 --container-image I"
        " --mount /workspace --env HF_TOKEN --srun-arg=--mpi=pmix --hf-model MODEL"
        " --megatron-path OUT --tp 1 --pp 1 --ep 8 --etp 1 --low-memory-save",
        "mckpt hf-to-megatron MODEL OUT --tp 1 --pp 1 --ep 8 --etp 1 --run-config",
    ),
    (
        "./scripts/conversion/convert.sh export --export-weight-dtype float16"
        " --torch-dtype bfloat16 --hf-model MODEL --megatron-path A/iter_0000000 --hf-path OUT"
        " --ep 8 --no-progress --distributed-save --dry-run",
        "mckpt megatron-to-hf A/iter_0000000 OUT --dry-run --dtype fp16 --like MODEL"
        " --tokenizer MODEL",
    ),
    (
        "python -m megatron.bridge.convert --source hf --target megatron --model-type llama"
        " --input-path A --output-path B --tensor-model-parallel-size 4"
        " --pipeline-model-parallel-size 2",
        "mckpt hf-to-megatron A B --tp 4 --pp 2 --run-config",
    ),
    (
        "python -m megatron.bridge.convert --source megatron --target megatron --input-path A"
        " --output-path B --source-tp 4 --source-pp 2 --target-tp 8 --target-pp 1",
        "mckpt reshard A B --tp 8 --pp 1",
    ),
    (
        "python -m megatron.bridge.convert --source-format megatron --target-format=huggingface"
        " --source-path A --target-path B --tensor-model-parallel-size 4",
        "mckpt megatron-to-hf A B",
    ),
    (
        "PYTHONPATH=/root/Megatron-LM torchrun --nproc-per-node 8"
        f" tools/convert_hf_to_torch_dist.py {SLIME_QWEN3_4B} --tensor-model-parallel-size 1"
        " --pipeline-model-parallel-size 8 --expert-tensor-parallel-size 1"
        " --decoder-last-pipeline-num-layers 6 --hf-checkpoint MODEL --save OUT",
        "mckpt hf-to-megatron MODEL OUT --tp 1 --pp 8 --etp 1 --decoder-last-pipeline-num-layers 6",
    ),
    (
        "python tools/convert_torch_dist_to_hf.py --input-dir A/iter_0000005/ --output-dir OUT"
        " --origin-hf-dir MODEL -f --vocab-size 151936 --chunk-size 5368709120",
        "mckpt megatron-to-hf A/iter_0000005/ OUT --like MODEL --tokenizer MODEL --overwrite"
        " --max-shard-size 5368709120 --vocab-size 151936",
    ),
    (
        "torchrun --nproc_per_node 8 scripts/converter_hf_to_mcore.py --hf_model_path MODEL"
        " --output_path OUT --pp_size 4 --use_cpu_initialization --trust_remote_code",
        "mckpt hf-to-megatron MODEL OUT --pp 4",
    ),
    (
        "python -m verl.model_merger merge --backend megatron --tie-word-embedding"
        " --local_dir run/global_step_1/actor --target_dir OUT",
        "mckpt megatron-to-hf run/global_step_1/actor/dist_ckpt OUT"
        " --like run/global_step_1/actor/huggingface"
        " --tokenizer run/global_step_1/actor/huggingface",
    ),
    (
        "CUDA_VISIBLE_DEVICES=0 swift export --model MODEL --to_mcore true --torch_dtype bfloat16"
        " --output_dir OUT --test_convert_precision true --exist_ok true",
        "mckpt hf-to-megatron MODEL OUT --dtype bf16 --overwrite --etp 1",
    ),
    (
        "NPROC_PER_NODE=2 megatron export --model MODEL --tensor_model_parallel_size 2"
        " --expert_tensor_parallel_size 1 --to_mcore true --save OUT",
        "mckpt hf-to-megatron MODEL OUT --tp 2 --etp 1",
    ),
    (
        "megatron export --mcore_model A --model MODEL --to_hf true --output_dir OUT"
        " --tensor_model_parallel_size 2 --max_shard_size 5GB",
        "mckpt megatron-to-hf A OUT --like MODEL --tokenizer MODEL --max-shard-size 5GB",
    ),
]
STARTS = (".py", ".sh", "verl.model_merger", "megatron.bridge.convert", "swift", "megatron")


@pytest.mark.parametrize(("theirs", "ours"), LINES)
def test_a_command_line_is_translated_and_nothing_is_dropped(theirs: str, ours: str) -> None:
    said = good("compat", *shlex.split(theirs))
    assert said.out.strip() == ours
    translated = shlex.split(ours)
    words = shlex.split(theirs)
    program = next(i for i, w in enumerate(words) if w.endswith(STARTS))
    assert not program or f"# {shlex.join(words[:program])}: is not needed" in said.err
    for word in words[program:]:
        name, _, value = word.partition("=")
        # these select the case
        known = {"--model-type", "--loader", "--saver", "--checkpoint-type"}
        known |= {"--backend", "--to_mcore", "--to_hf"}
        known |= {"--source", "--target", "--source-format", "--target-format"}
        if word.startswith("--") and f"# {name}" not in said.err and name not in known:
            assert _becomes(name, translated), f"{word} is neither translated nor named"
        if word.startswith("--") and value and name not in known:
            assert value in [*translated, *said.err.split(), *said.err.replace(":", " ").split()]


def _becomes(name: str, translated: list[str]) -> bool:
    """Whether the file turns this option into words that the translation contains."""
    for section in (part for tool in read() for part in (tool, *tool["cases"])):
        for key, becomes in section.get("options", {}).items():
            if name in (alias.split()[0] for alias in key.split(", ")):
                to = becomes
                if isinstance(becomes, dict):
                    to = becomes["to"] if "to" in becomes else list(becomes.get("below", []))
                names = {one.split()[0] for one in ([to] if isinstance(to, str) else to)}
                if names <= {"SRC", "DST", *translated}:
                    return True
    return False


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ("python llama.cpp/convert.py --outfile x", ["starts no program that is known"]),
        ("python -m other --target megatron --tp 2", ["starts no program that is known"]),
        (
            "python -m megatron.bridge.convert --source hf --target nemo --input-path A",
            ["--source hf, --target nemo: cannot be translated; known are"],
        ),
        (
            "python -m megatron.bridge.convert --source hf --target megatron --input-path A"
            " --output-path B --dtype bf16",
            ["--dtype: is unknown"],
        ),
        (
            "python convert.py --model-type GPT --loader core --saver core --load-dir A"
            " --target-tensor-paralel-size 2 --no-checking",
            [
                "--target-tensor-paralel-size: is unknown; did you mean"
                " --target-tensor-parallel-size?",
                "--no-checking: mckpt proves",
                "--save-dir: is missing",
            ],
        ),
        ("python convert.py --loader core --load-dir A --save-dir B", ["`--saver core`"]),
        (
            "python convert.py --model-type GPT --loader llava --saver core",
            ["--loader llava", "cannot be translated; known are", "mixtral_hf"],
        ),
        ("scripts/conversion/convert.sh roundtrip --hf-model A", ["mckpt verify"]),
        ("scripts/conversion/convert.sh", ["no subcommand", "import", "export"]),
        (
            "convert.sh export --hf-model A --megatron-path B --hf-path C --not-strict"
            " --torch-dtype float8",
            ["--not-strict: mckpt uses", "--torch-dtype float8: the values known are bfloat16"],
        ),
        ("convert.sh import extra --hf-model A --megatron-path B", ["extra: is unknown"]),
        ("convert.sh import --megatron-path B --hf-model", ["--hf-model: takes 1 values, not 0"]),
        (
            "tools/convert_hf_to_torch_dist.py --spec slime_plugins.models.glm4 get_glm_spec"
            " --hf-checkpoint A --save B",
            ["--spec slime_plugins.models.glm4 get_glm_spec: mckpt writes the names"],
        ),
        ("swift export --model A --output_dir B", ["cannot be translated; known are", "--to_hf"]),
        (
            "swift export --mcore_model A --mcore_adapter C --to_hf true --output_dir B",
            ["--mcore_adapter C: this command converts whole weights"],
        ),
        (
            "python -m verl.model_merger merge --backend megatron --target_dir B"
            " --hf_upload_path org/name",
            ["--local_dir: is missing", "--hf_upload_path org/name: `mckpt push"],
        ),
        ("python -m verl.model_merger merge --backend fsdp --local_dir A", ["verl's FSDP"]),
        ("nemo llm import model=llama32_1b source=hf://a/b", ["NeMo 2.0", "--run-config"]),
    ],
)
def test_what_cannot_be_translated_is_refused(theirs: str, words: list[str]) -> None:
    refused(2, *words, args=("compat", *shlex.split(theirs)))


def test_a_value_that_mckpt_does_not_take_is_refused() -> None:
    line = "convert.sh import --hf-model A --megatron-path B --tp two"
    refused(2, "'two'", args=("compat", *line.split()))


def test_a_model_on_the_hub_is_read_at_its_revision() -> None:
    model = "--hf-revision c1899de2 --hf-model Qwen/Qwen3-4B"
    said = good("compat", *f"convert.sh import {model} --megatron-path B".split())
    assert said.out.startswith("mckpt hf-to-megatron Qwen/Qwen3-4B@c1899de2 B ")
    said = good("compat", *f"convert.sh export {model} --megatron-path B --hf-path C".split())
    at = "Qwen/Qwen3-4B@c1899de2"
    assert said.out.strip() == f"mckpt megatron-to-hf B C --like {at} --tokenizer {at}"


def test_the_commands_run(src: Path, tmp_path: Path) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    imported = f"scripts/conversion/convert.sh import --hf-model {src} --megatron-path {a} --tp 2"
    good("compat", "--run", *imported.split())
    assert (a / "release" / "run_config.yaml").is_file()
    resharded = (
        f"python tools/checkpoint/convert.py --model-type GPT --loader core --saver core"
        f" --load-dir {a} --save-dir {b} --target-tensor-parallel-size 1"
    )
    said = good("compat", "--run", "--json", *resharded.split())
    assert json.loads(said.out)["source"]["format"] == "torch_dist"
    assert json.loads(good("inspect", b, "--json").out)["format"] == "torch"
    exported = (
        f"python tools/convert_torch_dist_to_hf.py --input-dir {b} --output-dir {c}"
        f" --origin-hf-dir {src}"
    )
    good("compat", "--run", *exported.split())
    good("diff", src, c)
    assert (c / "tokenizer.json").exists() == (src / "tokenizer.json").exists()


def test_the_exit_code_is_that_of_the_command(tmp_path: Path) -> None:
    line = f"convert.sh import --hf-model {tmp_path / 'none'} --megatron-path {tmp_path / 'b'}"
    said = mckpt("compat", "--run", "--json", *line.split())
    assert said.code == 3
    assert json.loads(said.err.splitlines()[-1])["error"]["class"] == "SourceError"


def test_every_option_of_the_file_exists() -> None:
    checked = 0
    for tool in read():
        for case in (case for case in tool["cases"] if "command" in case):
            ours = _flags(cli.commands[case["command"]])
            becomes = [*tool["options"].values(), *case["options"].values()]
            words = [word for one in becomes for word in _words(one)] + case.get("always", [])
            for word in (word for word in words if word.startswith("--")):
                assert word in ours, f"{tool['title']}: {word} is no option of {case['command']}"
                checked += 1
    assert checked > 50


def _words(becomes: Any) -> list[str]:
    if isinstance(becomes, dict):
        return _words(becomes.get("to", [])) + becomes.get("absent", [])
    return [w for one in ([becomes] if isinstance(becomes, str) else becomes) for w in one.split()]


def _flags(command: click.Command) -> set[str]:
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
