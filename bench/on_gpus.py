"""Runs that need GPUs, one after another, within a time: what ended well is left out when the command is given again.

    python bench/on_gpus.py --list                                     # every run, its GPUs, seconds and command
    python bench/on_gpus.py --out runs/gpus --seconds 570              # in order, while the next one's seconds are left
    python bench/on_gpus.py --out runs/gpus --only first-steps,step-32k --seconds 570

Each run writes `NAME.log` and, where its command has `{out}`, `NAME.json` with the table next to it; `runs.jsonl` has a
line a run: status and seconds. A run has half as long again as the seconds that stand here, and then it is ended with
its workers. Seconds are estimates for two H200s; the first run on a machine compiles kernels and takes a minute more.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parents[1]
STEP = "{python} -m longspan bench step --model.preset qwen3-8b --planners fixed --out {out}"
PEERS = STEP.replace("-m longspan bench step", "bench/training/step_peers.py")
SMALL = (  # on one GPU
    "{python} -m longspan bench step --world 1 --model.preset qwen3-4b --planners fixed --warmup 1 --repeats 1 "
    "--out {out}"
)
CHOICES = {"auto": "true --train.device_memory_limit 51539607552"} | {
    name: f"false --train.activation_checkpointing {keys}"
    for name, keys in {
        "selective": "selective",
        "selective-on-the-host": "selective+host",
        "full": "full",
    }.items()
}
ATTENTION = "{python} bench/attention/attention_types.py --types p2p,all_gather,a2a --no_peers --out {out}"
INDEXED = "{python} bench/attention/indexed_attention.py --out {out}"
# Layers whose rows choose pools or blocks, or see entries; transformers 5.24 has their classes.
SPARSE = "{python} bench/attention/sparse_layers.py --out {out}"
SPARSE_STEP = "{python} bench/training/sparse_step.py"
SPARSE_KINDS = {"qsa": "QSA", "csa": "CSA", "hca": "HCA", "m3": "MiniMax-M3"}
SHORT = ATTENTION.replace(",a2a", "")
NODES = "sh bench/two_nodes.sh --rate 1.25G"  # a link of 10 Gbit/s, the same at all times; without a rate it varies
TRAINER = "{torchrun} bench/training/trainer.py --preset qwen3-8b --layers 12 --documents 8 --length 13107 --cp 2"
YARN = "--model.rope_scaling yarn"
NF4 = "--model.frozen nf4"
ADAPTED = (
    "{python} -m longspan bench step --world 1 --planners fixed --model.preset qwen3-8b --model.dtype bfloat16 "
    f"--lora.rank 16 {YARN} --warmup 1 --repeats 2 --out {{out}}"
)
ONE = (
    "{python} -m longspan bench step --world 1 --planners fixed --model.preset qwen3-8b --warmup 1 --repeats 3 "
    "--out {out}"
)
ONE_PEER = "{python} bench/training/one_gpu_peer.py --out {out}"
FAMILIES = "{python} bench/training/families.py --warmup 0 --repeats 2 --model.preset qwen3-4b --out {out}"
# LoRA over 4-bit weights that wait on the host, by the GiB of a smaller card; "warm" is the second step.
FROZEN_HOST = (
    "{python} -m longspan bench step --world 1 --planners fixed --model.dtype bfloat16 --lora.rank 16 --warmup 0 "
    f"--repeats 1 {NF4} --out {{out}}"
)
LLAMA_70B = f"{FROZEN_HOST} --model.preset llama-3.3-70b-instruct --sequences 65536"
QWEN_A3B = (
    f"{FROZEN_HOST} --model.preset qwen3-30b-a3b --lora.target_modules q_proj,k_proj,v_proj,o_proj --sequences 32768"
)
SAME_MEASURES = "--train.activation_checkpointing full+host --train.mlp_tile_tokens 8192"
FROZEN_HOST_RUNS = {  # seconds, GiB of the device (0: all), command
    "70b": (420, 22.0, LLAMA_70B),
    "70b-best": (380, 78.0, LLAMA_70B),
    "70b-same": (400, 22.0, f"{LLAMA_70B} {SAME_MEASURES} --train.offload_weights true"),
    "70b-same-device": (380, 0.0, f"{LLAMA_70B} {SAME_MEASURES} --train.offload_weights false"),
    "a3b": (130, 7.3, QWEN_A3B),
    "a3b-same": (130, 7.3, f"{QWEN_A3B} {SAME_MEASURES} --train.offload_weights true"),
    "a3b-same-device": (110, 0.0, f"{QWEN_A3B} {SAME_MEASURES} --train.offload_weights false"),
    "32b": (270, 14.3, f"{FROZEN_HOST} --model.preset qwen3-32b {YARN} --sequences 65536"),
    "8b-192k": (370, 22.0, f"{FROZEN_HOST} --model.preset qwen3-8b {YARN} --sequences 196608"),
    "70b-128k": (580, 30.0, LLAMA_70B.replace("65536", "131072")),
}
ANSWERS = "--families 8x32768+1024 --context.max_tokens_per_slot 40967"
QUESTIONS = f"--model.preset qwen3-8b --model.dtype bfloat16 --lora.rank 16 {YARN} --repeats 1"
LONG = "--sequences 32768 --warmup 1 --repeats 2"
CHOSEN = "--train.plan_memory false --train.activation_checkpointing selective"
PYTEST = "{python} -m pytest -q --tb=short --resume {folder}/{name}.jsonl"  # which has the reasons of what failed
TESTS = f"{PYTEST} -m nccl"
SAME_AS_CPUS = f"{PYTEST} -m ''"  # without NCCL, and the tests that stand for a whole table too
PARTS = {"train": 170, "comm": 80, "attention": 170, "model": 110, "mixers": 240}  # seconds, the five beside each other
PACKED = "--same 8x8192 --context.max_tokens_per_slot 16384"


@dataclass(frozen=True)
class GpuRun:
    """A command, the GPUs that it takes, and the seconds that it is expected to."""

    name: str
    seconds: int
    command: str
    gpus: int = 2

    def words(self, folder: Path) -> list[str]:
        places = {
            "python": sys.executable,
            "torchrun": f"{sys.executable} -m torch.distributed.run --nproc-per-node {self.gpus}",
            "out": folder.resolve() / f"{self.name}.json",
            "folder": folder.resolve(),
            "name": self.name,
        }
        return shlex.split(self.command.format(**places))


# Steps by which prices are fitted and held out (bench/plans/predictions.py): on one GPU, and over two.
PRICED = "{python} -m longspan bench step --warmup 2 --repeats 3 --out {out}"
DENSE = f"{PRICED} --model.preset qwen3-8b --layers 8"
EAGER = f"--planners fixed --train.compile none {CHOSEN}"
RECOMPUTED = "--train.plan_memory false --train.activation_checkpointing full"
MIXTURE = f"{PRICED} --model.preset qwen3-30b-a3b --layers 4"
HYBRID = (
    f"{PRICED} --model.config examples/gpu/qwen3-next-8-layers --model.dtype bfloat16 --context.partition contiguous "
    "--planners fixed"
)
CHATS = "{python} bench/data/made_chats.py {folder}/chats --chats 64"
ADAPTERS = (
    '{python} -m longspan train examples/gpu/sft.toml --world 1 --model.path "" --model.preset qwen3-8b '
    "--data.path {folder}/chats/chats.jsonl --data.tokenizer {folder}/chats/tokenizer --evaluation.documents 2 "
    "--train.steps 4 --evaluation.every 0 --train.tokens_per_step 131072 --run.dir {folder}/{name}"
)
PRICED_STEPS = {  # seconds and command, by name and GPUs
    ("dense", 1): (60, f"{DENSE} --planners fixed --sequences 8192,16384,32768"),
    ("dense-packed", 1): (45, f"{DENSE} --planners fixed {PACKED}"),
    ("dense-long", 1): (60, f"{DENSE} --planners fixed --sequences 65536 {YARN}"),
    ("dense-recomputed", 1): (45, f"{DENSE} --planners fixed {RECOMPUTED} --sequences 32768"),
    ("dense-eager", 1): (45, f"{DENSE} {EAGER} --sequences 16384,8192"),
    ("dense-eager-packed", 1): (45, f"{DENSE} {EAGER} --same 4x8192 --context.max_tokens_per_slot 8192"),
    ("dense-lognorm", 1): (
        200,
        f"{DENSE} --planners fixed,padded --distribution lognorm --seed 11 --tokens 98304 --longest_document 32768 "
        "--context.max_tokens_per_slot 32768",
    ),
    ("experts", 1): (
        80,
        f"{MIXTURE} --planners fixed,padded --distribution lognorm --seed 4 --tokens 98304 --longest_document 24576 "
        "--context.max_tokens_per_slot 24576",
    ),
    ("experts-single", 1): (45, f"{MIXTURE} --planners fixed --sequences 16384"),
    ("hybrid", 1): (240, f"{HYBRID} --sequences 16384,32768"),  # with fla-core, and Triton of 3.7.1 or later
    ("hybrid-packed", 1): (120, f"{HYBRID} --same 8x4096 --context.max_tokens_per_slot 16384"),
    ("dense", 2): (60, f"{DENSE} --planners fixed --sequences 16384,32768"),
    ("dense-lognorm", 2): (
        100,
        f"{DENSE} --planners fixed,dynamic,padded --distribution lognorm --seed 12 --tokens 196608 "
        "--longest_document 40960 --context.max_tokens_per_slot 20480",
    ),
    ("pipeline", 2): (60, f"{DENSE} --planners fixed {PACKED.replace('16384', '8192')} --parallel.pp 2"),
}


# Many short micro-batches: 256 lognormal documents of 128 to 8,192 tokens, the lengths of Megatron-LM#5123
MANY = (
    "{python} -m longspan bench step --model.preset qwen3-4b --layers 12 --lengths bench/training/lengths_5123.json "
    "--planners fixed,dynamic --warmup 1 --repeats 2 --out {out}"
)
LOGNORM = "--distribution lognorm --seed 5 --tokens 98304 --longest_document 4080"
RING = "--context.context_parallel_size 4 --context.cp_comm_type p2p"
EVALUATION = "{python} bench/evaluation/evaluation_degrees.py --out {out} --whole true"
# the mixture of eight ranks whose plans give each document a degree of its own, through each axis of a home
DYNAMIC_8 = (
    f"{PRICED} --model.preset qwen3-30b-a3b --layers 8 --lengths bench/training/lengths_5123.json "
    "--planners fixed,dynamic --context.max_tokens_per_slot 4096"
)
AXES_8 = {"pp": "pp 2", "tp": "tp 2", "ep": "ep 4", "all": "pp 2 --parallel.tp 2 --parallel.ep 2"}
PEER_6555 = f"{MIXTURE} --lengths bench/peers/lengths_6555.json --context.max_tokens_per_slot 4096 --parallel.ep 4"


RUNS = (
    GpuRun(
        "first-steps",
        150,
        "{python} bench/training/first_steps.py --ranks 2 --longest 16384 --tail 49152 --tail_longest 8192 --steps 6 "
        "--runs cold,warm --out {out} -- --model.preset qwen3-0.6b --model.dtype bfloat16",
    ),
    *(GpuRun(f"tests-{part}", seconds, f"{TESTS} --backend nccl --part {part}") for part, seconds in PARTS.items()),
    GpuRun("tests-one", 240, f"env CUDA_VISIBLE_DEVICES=0 {TESTS} --backend nccl", gpus=1),
    GpuRun(
        "tests-float8",
        120,
        f"{SAME_AS_CPUS} tests/model/float8/test_on_gpus.py tests/model/float8/test_products.py "
        "tests/train/optim/test_one_pass_on_gpu.py",
        gpus=1,
    ),
    GpuRun("tests-compiled", 150, f"{SAME_AS_CPUS} tests/model/test_compiled_layers.py"),
    *(  # 2,048 rows hold the longest document on four GPUs, 4,096 on two
        GpuRun(f"many-{rows}-{mode}", 95, f"{MANY} --context.max_tokens_per_slot {rows} --context.mode {mode}", gpus)
        for rows, gpus in ((2048, 4), (16384, 2), (4096, 2), (8192, 2))
        for mode in ("lockstep", "free")
    ),
    GpuRun(  # and as short ones on two GPUs
        "many-2040-two",
        80,
        f"{MANY.replace('--lengths bench/training/lengths_5123.json', LOGNORM)} --context.max_tokens_per_slot 2040",
    ),
    # settings that others publish gains of dynamic plans for (bench/peers): a fixed plan made as theirs, then ours
    GpuRun(
        "peer-5123-ring", 300, f"{MANY.replace('fixed,dynamic', 'fixed')} --context.max_tokens_per_slot 2048 {RING}", 4
    ),
    GpuRun(
        "peer-5123-ring-two",
        200,
        f"{MANY.replace('fixed,dynamic', 'fixed')} --context.max_tokens_per_slot 4096 {RING.replace('4', '2')}",
    ),
    GpuRun("peer-6555-ring", 150, f"{PEER_6555} --planners fixed {RING}", 4),
    GpuRun("peer-6555", 150, f"{PEER_6555} --planners fixed,dynamic", 4),
    *(  # the two other ways of sharding: gradients summed in every micro-batch, and weights gathered there too
        GpuRun(
            f"many-4096-zero{stage}", 95, f"{MANY} --context.max_tokens_per_slot 4096 --train.plan_memory false {key}"
        )
        for stage, key in ((2, "--parallel.reshard_after_forward false"), (3, ""))
    ),
    GpuRun("step-16k", 60, f"{STEP} --sequences 16384"),
    *(  # adapters over weights in 4 bits, and over whole ones
        GpuRun(f"{name}-{rows >> 10}k", seconds, f"{ADAPTED} --sequences {rows}{frozen}", gpus=1)
        for name, frozen in (("frozen", f" {NF4}"), ("whole", ""))
        for rows, seconds in ((16384, 80), (65536, 110))
    ),
    GpuRun("frozen-24g", 110, f"{ADAPTED} {NF4} --sequences 65536 --train.device_memory_limit 23622320128", gpus=1),
    *(  # each row of bench/records/frozen-on-host-H200.md; 70B and 8B need a host of 252 GiB, the others one of 128
        GpuRun(
            f"frozen-host-{name}",
            seconds,
            command + (f" --train.device_memory_limit {int(gib * 2**30)}" if gib else ""),
            gpus=1,
        )
        for name, (seconds, gib, command) in FROZEN_HOST_RUNS.items()
    ),
    *(  # full training in float32: moments wait on the host, and then weights and gradients too; beside what people run
        GpuRun(f"{place}-{name}", seconds, f"{ONE} {lengths} {YARN}{key}", gpus=1)
        for place, key in (("one", ""), ("host", " --train.offload_weights true"))
        for name, lengths, seconds in (
            ("packed", "--same 4x8192", 110),
            ("32k", "--sequences 32768", 110),
            ("64k", "--sequences 65536", 140),
            ("128k", "--sequences 131072", 280),
            ("eight", "--same 8x32768 --context.max_tokens_per_slot 32768", 260),
        )
    ),
    GpuRun("moments-8bit-32k", 110, f"{ONE} --sequences 32768 {YARN} --optimizer.moments 8bit", gpus=1),
    GpuRun("families-prefix-grouper", 90, "{python} bench/peers/prefix_grouper.py --out {out}", gpus=1),
    GpuRun("one-peer", 560, f"{ONE_PEER} --mode float32", gpus=1),
    # beside the peer at the better of its two settings; ended by the clock, the same command goes on
    GpuRun("one-peer-best", 1200, f"{ONE_PEER} --mode full,lora --repeats 2", gpus=1),
    *(
        GpuRun(
            f"one-peer-best-{name}",
            seconds,
            f"{ONE_PEER} --mode lora --model {model} --targets q_proj,k_proj,v_proj,o_proj "
            "--steps 1x16384,1x32768 --repeats 2",
            gpus=1,
        )
        for name, model, seconds in (("a3b", "qwen3-30b-a3b", 560), ("gpt-oss", "gpt-oss-20b", 480))
    ),
    # weights on the host by the run's own plan, in less than the peer takes with gradient checkpointing
    GpuRun("one-lora-14g", 110, f"{ADAPTED} --same 4x8192 --train.device_memory_limit 15032385536", gpus=1),
    GpuRun("frozen-peer", 400, f"{ONE_PEER} --mode qlora", gpus=1),
    GpuRun(
        "frozen-70b",
        560,
        "{python} -m longspan bench step --world 1 --planners fixed --model.preset llama-3.3-70b-instruct "
        f"--model.dtype bfloat16 --lora.rank 16 {NF4} --sequences 65536 --train.device_memory_limit 85899345920 "
        "--warmup 1 --repeats 1 --out {out}",
        gpus=1,
    ),
    *(  # documents that begin alike, their prefix computed once, and then as separate documents
        GpuRun(f"families-{name}", seconds, f"{FAMILIES} {flags}", gpus)
        for name, seconds, flags, gpus in (
            ("pair", 170, "--loss pairs --families 2x32768+1024 --context.max_tokens_per_slot 67584 --world 1", 1),
            ("grpo", 340, f"--loss policy {ANSWERS} --world 1", 1),
            ("grpo-2", 240, f"--loss policy {ANSWERS} --context.cp_comm_type p2p", 2),
            ("grpo-2-a2a", 240, f"--loss policy {ANSWERS} --context.cp_comm_type a2a", 2),
            # 64 answers of 2K to a prompt of 128K; two of the separate documents, which take 24 minutes, are timed
            ("answers", 400, f"--loss policy --families 64x131072+2048 --separate 2 {QUESTIONS}", 2),
            ("questions", 480, f"--families 20x100000+200 --separate 2 --world 1 {QUESTIONS}", 1),
        )
    ),
    GpuRun("step-32k", 100, f"{STEP} {LONG}"),
    GpuRun("step-32k-room", 75, f"{STEP} {LONG} --train.device_memory_limit 118111600640"),  # 110 GiB
    *(
        GpuRun(f"step-32k-{name}", 75, f"{STEP} {LONG} --context.cp_comm_type {name}")
        for name in ("a2a", "p2p", "all_gather")
    ),
    *(  # the same activations saved, so that the update alone differs
        GpuRun(f"{name}-32k", 90, f"{STEP} {LONG} {CHOSEN} --optimizer.class {name}") for name in ("adamw", "muon")
    ),
    *(  # the updates alone
        GpuRun(f"updates-{gpus}", 90, "{torchrun} bench/training/updates.py --out {out}", gpus) for gpus in (1, 2)
    ),
    GpuRun("step-64k", 110, f"{STEP} --sequences 65536 {YARN}"),
    GpuRun("step-64k-selective", 90, f"{STEP} --sequences 65536 {YARN} {CHOSEN}"),
    GpuRun("step-64k-host", 110, f"{STEP} --sequences 65536 {YARN} {CHOSEN}+host"),
    GpuRun("step-packed", 180, f"{PEERS} {PACKED}"),
    GpuRun("step-packed-float8", 80, f"{STEP} {PACKED} --train.float8 rowwise"),
    GpuRun("step-128k", 130, f"{STEP} --sequences 131072 {YARN} --warmup 1 --repeats 2", gpus=4),
    GpuRun("step-512k", 400, f"{STEP} --sequences 524288 {YARN} --warmup 1 --repeats 1", gpus=4),
    GpuRun("step-256k", 330, f"{STEP} --sequences 262144 {YARN} --warmup 1 --repeats 1"),
    # the longest documents of `longspan plan --longest` (bench/records/what-fits.md), and 5 % longer ones, which fill
    # more than a run fills
    GpuRun("longest-none", 70, f"{STEP} --sequences 28672,30720 --train.plan_memory false --warmup 1 --repeats 1"),
    GpuRun("longest-selective", 300, f"{STEP} --sequences 212992,223232 {YARN} {CHOSEN} --warmup 1 --repeats 1"),
    GpuRun("longest-one-none", 60, f"{SMALL} --sequences 20480,21504 --train.plan_memory false", gpus=1),
    GpuRun("longest-one-selective", 150, f"{SMALL} --sequences 139264,146432 {YARN} {CHOSEN}", gpus=1),
    # what `train.plan_memory = true` chooses within 48 GiB, and six settings by hand that fit there as well
    *(
        GpuRun(f"choice-{name}", 45, f"{STEP} --layers 12 --sequences 32768 --train.plan_memory {keys}")
        for name, keys in CHOICES.items()
    ),
    GpuRun("step-peers", 150, f"{PEERS.replace('fixed', 'none')} --sequences 8192,16384,32768 --repeats 2"),
    GpuRun("trainer-train", 100, f"{TRAINER} --plan_memory --out {{folder}}/trainer.json --ways train"),
    GpuRun("trainer-sft", 95, f"{TRAINER} --plan_memory --out {{folder}}/trainer.json --ways SFTTrainer"),
    GpuRun("trainer-trl", 95, f"{TRAINER} --plan_memory --out {{folder}}/trainer.json --ways 'TRL cp'"),
    *(  # one document over weights that every GPU has whole; the rule by which PP 4 is composed is judged on two stages
        GpuRun(f"evaluation-whole-{name}", seconds, f"{EVALUATION} --documents 1 --cases {flags}")
        for name, seconds, flags in (
            ("published", 60, "1k-tp1,8k-tp1"),
            *((f"{rows >> 10}k", 50, f"8k-tp1 --tokens {rows}") for rows in (16384, 32768, 65536, 131072)),
            ("pp2", 60, "8k-pp2,16k-pp2"),
        )
    ),
    GpuRun("calibrate", 120, "{python} -m longspan bench calibrate --out {out}"),
    # the four capabilities on eight GPUs, beside bridge-8 below; four documents are the published work of four slots
    GpuRun("evaluation-eight", 240, f"{EVALUATION} --documents 4 --cases 1k-tp2,8k-tp2,8k-tp2-pp2,16k-tp2-pp2", 8),
    GpuRun("evaluation-eight-pp4", 150, f"{EVALUATION} --documents 2 --cases 8k-pp4,16k-pp4", 8),
    *(GpuRun(f"dynamic-eight-{name}", 200, f"{DYNAMIC_8} --parallel.{keys}", 8) for name, keys in AXES_8.items()),
    *(
        GpuRun(f"hierarchical-{name}", 120, f"{command} --lengths 16384,65536,131072,262144 --hierarchical 4,2", 8)
        for name, command in (
            ("eight", f"{ATTENTION.replace('a2a', 'a2a,a2a+p2p')}"),
            ("two-nodes", f"{NODES} {ATTENTION.replace('{python}', 'python').replace('a2a', 'a2a,a2a+p2p')}"),
        )
    ),
    GpuRun(
        "convergence-mixture",
        900,
        "{python} bench/training/convergence.py --preset qwen3-moe-tiny --device cuda --world 2 --steps 2000 "
        "--recipes adamw:bfloat16:0.001 --out {out}",
    ),
    *(  # two documents on four GPUs are the published work of each
        GpuRun(
            f"evaluation-{name}",
            100,
            "{python} bench/evaluation/evaluation_degrees.py --cases 1k-tp2,8k-tp2,8k-pp2,16k-pp2 --whole true "
            f"--documents {documents} --compiled {compiled} --out {{out}}",
            gpus=4,
        )
        for name, documents, compiled in (("one", 1, "none"), ("equal", 2, "none"), ("compiled", 2, "layers"))
    ),
    *(  # two nodes of one GPU have no level inside a node
        GpuRun(
            f"evaluation-two-nodes-{gpus}",
            130,
            f"{NODES} python bench/evaluation/evaluation_two_nodes.py --out {{out}}",
            gpus,
        )
        for gpus in (2, 4)
    ),
    *(GpuRun(f"bridge-{gpus}", 90, "{python} bench/bridge/bridge_time.py --out {out}", gpus) for gpus in (2, 4, 8)),
    GpuRun("bridge-two-nodes", 120, f"{NODES} python bench/bridge/bridge_time.py --out {{out}}", gpus=4),
    GpuRun(
        "saves",
        240,
        "{torchrun} bench/training/saves.py --preset qwen3-8b --steps 60 --every 40 --tokens 16384 --ways background "
        "--out {out}",
    ),
    GpuRun("longest-1m", 260, "{torchrun} bench/training/longest.py --rows 1048576 --out {out}"),
    GpuRun("longest-1769k", 400, "{torchrun} bench/training/longest.py --rows 1769472 --small 16 --out {out}"),
    # on two H100s, the measures that 1,769,472 rows have on two H200s
    GpuRun("longest-700k", 200, "{torchrun} bench/training/longest.py --rows 720896 --small 16 --out {out}"),
    GpuRun(
        "verl-update", 190, "{torchrun} bench/training/verl_update.py --folder {folder}/model --samples 48 --out {out}"
    ),
    GpuRun(
        "mixture",
        160,
        "{python} -m longspan bench step --model.preset qwen3-30b-a3b --layers 4 --distribution lognorm --seed 4 "
        "--tokens 98304 --longest_document 24576 --context.max_tokens_per_slot 12288 --planners padded,fixed,dynamic "
        "--out {out}",
    ),
    GpuRun("attention", 60, f"{ATTENTION} --lengths 16384,65536,131072"),
    GpuRun("attention-packed", 60, f"{ATTENTION} --lengths 65536,131072 --documents 8"),
    GpuRun("attention-short", 60, f"{SHORT} --lengths 16384 --documents 8 --cuda_graph"),
    GpuRun("attention-window", 60, f"{ATTENTION} --lengths 16384,65536,131072 --window 4096"),
    GpuRun("divergence", 90, "{python} bench/training/divergence.py --out {out}", gpus=1),
    GpuRun("indexed-attention-one", 180, f"{INDEXED} --world 1", gpus=1),
    GpuRun("indexed-attention", 130, f"{INDEXED} --world 2"),
    GpuRun("indexed-step", 90, "{torchrun} bench/training/indexed_step.py --out {out}"),
    *(GpuRun(f"sparse-{name}", 120, f"{SPARSE} --kinds {kind}", gpus=1) for name, kind in SPARSE_KINDS.items()),
    GpuRun("sparse-crossing", 150, f"{SPARSE} --kinds QSA,MiniMax-M3 --lengths 8192,16384,32768,65536", gpus=1),
    *(
        GpuRun(f"sparse-losses-{name}", 150, f"{{torchrun}} bench/training/sparse_step.py --kinds {kind} --out {{out}}")
        for name, kind in SPARSE_KINDS.items()
    ),
    *(
        GpuRun(
            f"sparse-step-{name}" if gpus == 1 else f"sparse-step-{name}-{gpus}",
            120,
            f"sh -c '{SPARSE_STEP} --kinds {kind} --write {{folder}}/{name} && {PRICED} --world {gpus} "
            f"--planners fixed --model.config {{folder}}/{name} --sequences 65536 {RECOMPUTED}'",
            gpus,
        )
        for name, kind in SPARSE_KINDS.items()
        for gpus in (1, 2)
    ),
    GpuRun("two-nodes", 120, f"{NODES} longspan bench calibrate --out {{out}}"),
    GpuRun(
        "two-nodes-attention",
        75,
        f"{NODES} {ATTENTION.replace('{python}', 'python')} --lengths 16384,65536,131072 --warmup 3 --repeats 10",
    ),
    GpuRun(
        "two-nodes-attention-long",
        100,
        f"{NODES} {ATTENTION.replace('{python}', 'python')} --lengths 262144,524288 --warmup 1 --repeats 2",
    ),
    GpuRun(
        "two-nodes-hsdp",
        130,
        f"{NODES} longspan bench step --run.machine {{folder}}/two-nodes.json --planners fixed,dynamic "
        "--distribution lognorm --seed 5 --tokens 131072 --longest_document 16384 --parallel.dp_replicate 2 --layers 4 "
        "--warmup 1 --repeats 2 --out {out}",
    ),
    GpuRun(
        "two-nodes-fsdp2",
        200,
        f"{NODES} longspan bench step --run.machine {{folder}}/two-nodes.json --planners fixed,dynamic "
        "--distribution lognorm --seed 6 --tokens 65536 --longest_document 16384 --layers 2 --warmup 1 --repeats 1 "
        "--out {out}",
    ),
    GpuRun("two-nodes-four", 120, "sh bench/two_nodes.sh longspan bench calibrate --out {out}", gpus=4),
    *(
        GpuRun(
            f"two-nodes-{mode}",
            200,
            "sh bench/two_nodes.sh longspan bench step --run.machine {folder}/two-nodes-four.json --planners "
            "fixed,dynamic --distribution lognorm --seed 7 --tokens 524288 --longest_document 65536 "
            f"--context.max_tokens_per_slot 16384 --context.mode {mode} --layers 8 {YARN} --warmup 1 --repeats 1 "
            "--out {out}",
            gpus=4,
        )
        for mode in ("lockstep", "free")
    ),
    GpuRun("price-adapters", 150, f"sh -c '{CHATS} && {ADAPTERS}'", gpus=1),
    *(
        GpuRun(f"price-{name}" if gpus == 1 else f"price-{name}-{gpus}", seconds, f"{command} --world {gpus}", gpus)
        for (name, gpus), (seconds, command) in PRICED_STEPS.items()
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpus"), help="folder of results")
    parser.add_argument("--only", default="", help="names of runs, with commas between; their order counts")
    parser.add_argument("--seconds", type=float, default=1e9, help="for all runs of this call")
    parser.add_argument("--list", action="store_true", help="show the runs, and start none")
    options = parser.parse_args()
    runs = choose_runs(options.only)
    if options.list:
        for run in runs:
            print(f"{run.name} ({run.gpus} GPUs, {run.seconds} s): {shlex.join(run.words(options.out))}")
        return
    sys.exit(0 if take_runs(runs, options.out, options.seconds) else 1)


def choose_runs(names: str) -> list[GpuRun]:
    by_name = {run.name: run for run in RUNS}
    chosen = [word.strip() for word in names.split(",") if word.strip()] or list(by_name)
    if unknown := [name for name in chosen if name not in by_name]:
        sys.exit(f"--only has {', '.join(unknown)}; runs are {', '.join(by_name)}")
    return [by_name[name] for name in chosen]


def take_runs(runs: list[GpuRun], folder: Path, seconds: float) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "runs.jsonl"
    started = time.monotonic()
    good = True
    lines = rows.read_text().splitlines() if rows.exists() else []
    done = {row["name"] for row in map(json.loads, lines) if row["status"] == 0}
    for run in runs:
        left = seconds - (time.monotonic() - started)
        if run.name in done or left < run.seconds:
            print(
                f"{run.name}: {'done before' if run.name in done else f'{left:.0f} s are left, it takes {run.seconds}'}"
            )
            continue
        row = take_run(run, folder, min(left, 1.5 * run.seconds))
        good = good and row["status"] == 0
        with rows.open("a") as opened:
            opened.write(json.dumps(row) + "\n")
    return good


def take_run(run: GpuRun, folder: Path, limit: float) -> dict[str, str | int | float]:
    log = folder / f"{run.name}.log"
    started = time.monotonic()
    paths = [str(HERE / "src"), str(HERE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHON": sys.executable}
    with log.open("wb") as opened:
        process = subprocess.Popen(
            run.words(folder),
            cwd=HERE,
            env=environment,
            stdout=opened,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                _end_session(process, number)
    seconds = round(time.monotonic() - started, 1)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print(
        f"{run.name}: status {status}, {seconds:g} s\n  " + "\n  ".join(line[:200] for line in lines[-4:]), flush=True
    )
    return {"name": run.name, "status": status, "seconds": seconds}


def _end_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to what is left of a process's session, and wait up to five seconds until nothing is."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
        for _ in range(50):
            time.sleep(0.1)
            process.poll()  # one that has ended stays in its session until it is waited for
            os.killpg(process.pid, 0)


if __name__ == "__main__":
    main()
