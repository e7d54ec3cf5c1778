"""How each documented command is run: the table of test_docs.py.

`Run`: by test_docs.py itself, in the order of its page, in a folder of the page; `add` are flags that make it
small (they stand last, so they win), `says` is what it must print; 8 and 4 ranks are made 2. `Make`: what
`make -n` prints is run so. `ByTest`: that test runs it, or the same with smaller sizes. `Suite`: a part of
`.ci/run`. `Packages`: pip is not run; the extras must exist, by which make sets up every environment.
`Nobody`: nothing runs it, and why.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALL = (
    "--layers 1 --dim 32 --heads 2 --context 32 --batch-size 4 --micro-batch 1 --eval-windows 4 --sample 10"
)
SHORT = "--steps 6 --warmup 2 --data my-texts"
TINY = f"{SMALL} {SHORT}"
TUNED = "--steps 3 --batch-size 2 --micro-batch 1 --eval-windows 2 --sample 10"


@dataclass(frozen=True)
class Run:
    """Run here."""

    add: str = ""
    says: str = ""
    statuses: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Make:
    """A target whose only command, beside setting up, is `prints`; that one is run here."""

    prints: str
    add: str
    says: str = ""


@dataclass(frozen=True)
class ByTest:
    """Run by `file::test`; for a target of make, whose command is `prints`."""

    test: str
    prints: str = ""


@dataclass(frozen=True)
class Suite:
    """Run by the script that every change must pass."""

    in_ci: str


@dataclass(frozen=True)
class Packages:
    """An installation."""


@dataclass(frozen=True)
class Nobody:
    """Nothing runs it."""

    why: str


How = Run | Make | ByTest | Suite | Packages | Nobody

TRAIN = "mpirun -n 8 python -m zero_mpi.train"
SAVED = r"saved runs/\w+/step-0*\d+ in .* state [0-9a-f]{16}"
BENCHMARKS, HOSTS = "tests/serial/test_benchmarks.py::", "tests/cluster/test_hosts.py::"
SLURM, BATCH = "tests/cluster/test_slurm.py::", "tests/serial/test_batch.py::"
OVER_HOSTS = ByTest(f"{HOSTS}test_same_bytes_as_in_one_process")
PBS = ByTest(f"{BATCH}test_a_pbs_job_told_to_stop_is_followed_by_one_that_goes_on")
REAL_MODEL = "tests/serial/test_finetune.py::test_the_example_teaches_answers_and_shows_what_was_gained"
HALVES = ByTest("tests/serial/test_examples.py::test_each_half_of_a_run_may_have_its_own_number_of_ranks")
EXAMPLE = ByTest("tests/serial/test_examples.py::test_example_lowers_its_loss")
NO_TORCH = Nobody("it needs PyTorch, which the project does not install, and measures speed")
SPEED = Nobody("it measures speed over hosts that it makes; as root, by hand")

STARTING: dict[str, How] = {
    "make train": Make(TRAIN, TINY, SAVED),
    'make train N=4 ARGS="--steps 50 --out runs/short"': Make(
        "mpirun -n 4 python -m zero_mpi.train --steps 50 --out runs/short", TINY, SAVED
    ),
    "make finetune": ByTest(REAL_MODEL, "mpirun -n 2 python examples/finetune_smollm2.py"),
    "make check": Suite("make -k check"),
    "make test": Suite("make test"),
    "make test-all": Nobody("`.ci/run --long` does: it takes an hour"),
    "make docs": Suite("make docs"),
    "pip install '.[mpich,fast]'": Packages(),
    "pip install '.[mpich,fast,tokenizers]'": Packages(),
    "pip install -e '.[mpich,test]'": Packages(),
    "pip install '.[ggml]'": Packages(),
    "mpiexec -n 4 python -m pytest --with-mpi": Suite("make test"),
    ".venv/bin/python -m pytest tests/serial/test_layers.py": Suite("make test"),
    ".venv/bin/mpiexec -n 3 .venv/bin/python -m pytest --with-mpi tests/mpi": Suite("make test"),
    ".venv/bin/python tests/random_kills.py --count 100 --out /tmp/kills --data README.md": ByTest(
        "tests/serial/test_kills.py::test_random_kills_of_ranks_launcher_and_job_lose_nothing"
    ),
    ".venv/bin/python tests/run_sizes.py -n 2,3 tests/mpi": Suite("make test"),
    "source .venv/bin/activate": Run(),
}

TRAINING: dict[str, How] = {
    TRAIN: Run(TINY),  # where a page has trained already it goes on, or has nothing to do
    "mpirun -n 3 python -m zero_mpi.train --steps 500": Run(
        f"{TINY} --steps 9", "resuming from .* at step 6"
    ),
    "mpirun -n 4 python -m zero_mpi.train --help": Run(says="--strategy"),
    "mpirun -n 8 python -m zero_mpi.train --help-all": Run(says="--writers-per-node"),
    "mpirun -n 4 python -m zero_mpi.train --layers 6 --dim 256 --heads 8 --out runs/larger": Run(TINY, SAVED),
    "mpirun -n 4 python -m zero_mpi.train --config runs/larger/config.toml --lr 2e-3 --out runs/slower": Run(
        "--steps 3", SAVED
    ),
    "mpirun -n 4 python -m zero_mpi.train --data my-texts --context 256 --out runs/mine": Run(
        f"{TINY} --context 64", SAVED
    ),
    f"{TRAIN} --config run.toml --steps 1000 --max-time 3h50m --out runs/default": Run(TINY, SAVED),
    "mpirun -n 2 python -m zero_mpi.train --dry-run --layers 6 --dim 256 --heads 8": Run(says="MiB"),
    "mpirun -n 2 python -m zero_mpi.train --init MODEL.gguf --data my-texts --context 128 --lr 1e-4 "
    "--out runs/tuned": Run(TUNED, SAVED),
    "mpirun -n 2 python -m zero_mpi.train --init MODEL.gguf --lora 8 --data my-texts --context 128 "
    "--out runs/adapter": Run(TUNED, SAVED),
    "mpirun -n 2 python examples/finetune_smollm2.py --steps 100 --out runs/longer": ByTest(REAL_MODEL),
    "mpirun -n 4 python -m zero_mpi.train --save-every 20 --keep 2 --async-save --steps 100 "
    "--out runs/saved": Run(f"{TINY} --steps 100", "step-00000080 .*(?s:.)*step-00000100 "),
    "mpirun -n 2 python -m zero_mpi.train --steps 400 --eval-every 20 --patience 3 --out runs/patient": Run(
        f"{TINY} --eval-every 2", "best validation loss is .*: runs/patient/best"
    ),
    "mpirun -n 4 python -m zero_mpi.train --steps 60 --save-every 20 --out runs/proved": Run(
        f"{TINY} --steps 12 --save-every 4", "proof: [0-9a-f]{64}"
    ),
    "mpirun -n 2 python -m zero_mpi.train --steps 60 --save-every 20 --seed 1 --out runs/other": Run(
        f"{TINY} --steps 12 --save-every 4", "proof: [0-9a-f]{64}"
    ),
    "zero-mpi inspect runs/proved runs/other": Run(says="verdict +different", statuses=(1,)),
    "mpirun -n 3 python -m zero_mpi.train --steps 120 --out runs/saved --strategy no-shard": Run(
        f"{TINY} --steps 103", "resuming from .*step-00000100 at step 100"
    ),
    "mpirun -n 2 python -m zero_mpi.train --steps 120 --out runs/again "
    "--resume runs/saved/step-00000100": Run(f"{TINY} --steps 103", "at step 100"),
    "mpirun -n 2 python -m zero_mpi.train --steps 10 --out runs/saved --resume never": Run(TINY, SAVED),
    "mpirun -n 1 python -m zero_mpi.train --steps 20 --out runs/one": Run(TINY, SAVED),
    "mpirun -n 3 python -m zero_mpi.train --steps 20 --out runs/three --strategy no-shard "
    "--transport mpi": Run(TINY, SAVED),
    "mpirun -n 2 python -m zero_mpi.train --bits portable --steps 20 --out runs/portable": ByTest(
        "tests/serial/test_portable.py::test_unlike_hosts_train_together_and_a_resume_keeps_the_bits"
    ),
}

MAKING: dict[str, How] = {
    "mpirun -n 8 zero-mpi tokenize my-texts --tokenizer MODEL.gguf --out tokens": Run(
        says="tokens: .* documents, .*--data "
    ),
    "mpirun -n 8 python -m zero_mpi.train --data tokens --context 128 --out runs/tokens": Run(
        f"{SMALL} --steps 6 --warmup 2", SAVED
    ),
    "mpirun -n 3 zero-mpi tokenize pages.jsonl.zst more.parquet --field content "
    "--tokenizer tokenizer.json": ByTest("tests/serial/test_tokenize.py::test_documents_of_each_format"),
}

PREFERRING = "tests/serial/test_preference_runs.py::"
EVALUATING: dict[str, How] = {
    "mpirun -n 2 python -m zero_mpi.train --init MODEL.gguf --lora 8 --loss dpo --data pairs.jsonl": ByTest(
        f"{PREFERRING}test_ranks_and_a_resume_change_no_bit_and_it_is_verified"
    ),
    **dict.fromkeys(
        (
            "mpirun -n 2 zero-mpi evaluate TEACHER.gguf --data my-texts --top-k-out top.bin --top-k 32",
            "mpirun -n 2 python -m zero_mpi.train --data my-texts --tokenizer TEACHER.gguf --teacher top.bin",
        ),
        ByTest(
            "tests/serial/test_distill.py::"
            "test_predictions_and_what_is_learned_from_them_are_the_same_on_any_ranks"
        ),
    ),
    "zero-mpi samples MODEL.gguf --data pairs.jsonl": ByTest(
        f"{PREFERRING}test_samples_shows_both_sides_of_a_pair"
    ),
    "mpirun -n 2 python -m zero_mpi.train --init MODEL.gguf --data chat.jsonl --lora 8 "
    "--out runs/chat": ByTest(
        "tests/serial/test_defaults.py::test_conversations_beside_a_model_decide_what_no_flag_says"
    ),
    "mpirun -n 2 zero-mpi evaluate MODEL.gguf --data my-texts --context 128": Run(
        "--context 64", "nats/token"
    ),
    "mpirun -n 2 zero-mpi evaluate MODEL.gguf --data my-texts --context 128 --stride 64 "
    "--json figures.json": Run("--context 64 --stride 32", "a new one every 32"),
    "zero-mpi evaluate runs/tuned/latest --data my-texts --context 128 --against MODEL.gguf": ByTest(
        "tests/serial/test_evaluate.py::test_a_second_model_reads_the_same_windows"
    ),
    "zero-mpi evaluate MODEL.gguf --lora runs/adapter/latest --data my-texts --context 128 "
    "--against MODEL.gguf": ByTest("tests/serial/test_lora.py::test_evaluate_takes_an_adapter_with_its_base"),
    "mpirun -n 2 zero-mpi evaluate MODEL.gguf --choices questions.jsonl": ByTest(
        "tests/serial/test_evaluate.py::test_answers_have_the_likelihood_of_their_tokens"
    ),
    "mpirun -n 2 zero-mpi evaluate MODEL.gguf --task arc_easy.jsonl --json figures.json": ByTest(
        "tests/serial/test_task_files.py::test_shares_and_log_likelihoods_are_lm_evals"
    ),
    "mpirun -n 2 zero-mpi evaluate MODEL.gguf --task core/hellaswag.jsonl --shots 10": ByTest(
        "tests/serial/test_task_files.py::test_core_is_nanochats"
    ),
}

LOOKING: dict[str, How] = {
    "zero-mpi samples MODEL.gguf --data chat.jsonl --chat-template chat_template.jinja": ByTest(
        "tests/serial/test_samples.py::test_all_counts_and_another_template"
    ),
    "ls runs/default": Run(says="metrics.jsonl"),
    "ls runs/saved": Run(says="step-00000080\nstep-00000100\n"),
    "cat runs/default/status.json": Run(says='"state": "done"'),
    "tail -n 1 runs/default/metrics.jsonl": Run(says='"step": 6, .*"val_loss"'),
    "zero-mpi inspect runs/default/latest": Run(says="sound"),
    "zero-mpi inspect MODEL.gguf": Run(says="llama"),
    "zero-mpi inspect model.gguf": Run(says="F16"),
    "zero-mpi inspect runs/saved/latest": Run(says="sound"),
    "mpirun -n 3 zero-mpi verify runs/proved --strategy no-shard --transport mpi": Run(
        says="yes: .* steps 1-12 have the same bits, .* 3 ranks"
    ),
    "zero-mpi verify runs/proved --sample 1": Run(says="yes: .* have the same bits"),
    "zero-mpi verify runs/proved --from 20 --to 40": Run("--from 4 --to 8", "yes: .* steps 5-8"),
    "zero-mpi inspect runs/saved/latest --tensors --keys": Run(says="blk.0.attn_q.weight"),
    "zero-mpi inspect runs/saved/latest runs/again/latest": Run(says="verdict +identical"),
    "zero-mpi inspect runs/one/latest runs/three/latest": Run(says="verdict +identical"),
    "diff <(grep -o '\"loss\": [^,]*' runs/one/metrics.jsonl) "
    "<(grep -o '\"loss\": [^,]*' runs/three/metrics.jsonl)": Run(),
    'zero-mpi generate runs/tuned/latest/model.gguf --prompt "The " --tokens 50': Run(says="The "),
    'zero-mpi generate MODEL.gguf --lora runs/adapter/latest --prompt "The " --tokens 50': Run(says="The "),
    "zero-mpi export runs/adapter/latest peft-folder --base MODEL.gguf": Run(says="peft-folder: f32"),
    "zero-mpi export peft-folder adapter.gguf --base MODEL.gguf": Run(says="adapter.gguf: f32"),
    'zero-mpi generate runs/default/latest/model.gguf --prompt "def " --tokens 100': Run(says="def "),
    'zero-mpi generate runs/default/latest --prompt "class " --tokens 100 --temperature 0.5 --seed 1': Run(
        says="class "
    ),
    'zero-mpi generate MODEL.gguf --chat --system "Be short." --prompt "What is a list?" --tokens 40': ByTest(
        "tests/serial/test_chat.py::test_a_prompt_is_answered_by_the_template_up_to_the_end"
    ),
    "zero-mpi export runs/tuned/latest tuned-q8.gguf --type q8_0": Run(says="tuned-q8.gguf"),
    "zero-mpi export MODEL.gguf merged.gguf --merge runs/adapter/latest": Run(says="merged.gguf"),
    "zero-mpi export runs/saved/latest model-q8.gguf --type q8_0": Run(says="model-q8.gguf"),
    "zero-mpi export runs/saved/latest model-folder --format safetensors": Run(says="model-folder"),
    "zero-mpi export runs/default/latest model.gguf --type f16": Run(says="model.gguf"),
    "mpirun -n 2 python -m zero_mpi.train --arch qwen3moe --experts 8 --experts-used 2 --expert-ffn 128": Run(
        f"{TINY} --out runs/mixture", "validation loss"
    ),
    "mpirun -n 2 python -m zero_mpi.train --init MIXTURE.gguf --lora 8 --data TEXT": ByTest(
        "tests/serial/test_lora_files.py::test_base_with_adapter_is_the_merged_model_and_llama_cpps"
    ),
    "mpirun -n 2 python -m zero_mpi.train --init MIXTURE.gguf --lora 8 --lora-targets 'blk.*.attn_*' "
    "'blk.*_exps*' --data TEXT": ByTest(
        "tests/serial/test_lora_files.py::test_base_with_adapter_is_the_merged_model_and_llama_cpps"
    ),
    "mpirun -n 8 zero-mpi train --init model.gguf --data TEXT --qat q4_0": ByTest(
        "tests/serial/test_qat.py::test_bits_are_the_same_on_any_ranks_and_after_a_resume"
    ),
    "zero-mpi export runs/default/latest model-q4.gguf --type q4_0": ByTest(
        "tests/serial/test_qat.py::test_a_checkpoint_and_its_export_hold_rounded_weights"
    ),
    "mpirun -n 8 zero-mpi evaluate model-q4.gguf --against model.gguf --data TEXT --kl": ByTest(
        "tests/serial/test_evaluate.py::test_divergence_is_that_of_the_logits_on_any_ranks"
    ),
    "mpirun -n 8 zero-mpi evaluate model.gguf --data TEXT --imatrix model.imatrix.gguf": ByTest(
        "tests/serial/test_evaluate.py::test_an_importance_matrix_has_the_squares_of_all_inputs"
    ),
    "zero-mpi export model.gguf model-q2.gguf --type q2_k_s --imatrix model.imatrix.gguf": ByTest(
        "tests/serial/test_quantize.py::test_bytes_are_the_same_on_three_ranks"
    ),
    "mpirun -n 8 zero-mpi export runs/default/latest model.gguf --type q4_k_m": ByTest(
        "tests/serial/test_quantize.py::test_bytes_are_the_same_on_three_ranks"
    ),
    "zero-mpi --help": Run(says="doctor"),
    "zero-mpi --version": Run(says=r"zero_mpi \d+\.\d+"),
    "zero-mpi completion bash > zero-mpi.bash": Run(),
}

PLANNING: dict[str, How] = {
    "mpirun -n 2 zero-mpi doctor --out runs/default --json doctor.json": Run(
        "--quick",
        "transport|MPI",
        statuses=(0, 1),  # the machine of a test may be bad for a real job
    ),
    "zero-mpi plan --arch qwen3moe --layers 48 --dim 2048 --heads 32 --kv-heads 4 --experts 128 "
    "--experts-used 8 --expert-ffn 768 --vocab-size 151936 --lora 8 --base q4_0 --context 512 "
    "--batch-size 16 --ranks 4 --nodes 4": Run(says="13.9 GiB"),
    "mpirun -n 2 zero-mpi doctor --quick": ByTest("tests/serial/test_doctor.py::test_rows_are_true"),
    "zero-mpi plan --init MODEL.gguf --context 128 --batch-size 64 --ranks 16 --nodes 4 "
    "--doctor doctor.json": Run("--memory 50M --strategy full-shard", "full-shard"),
    "zero-mpi plan --init MODEL.gguf --context 128 --batch-size 8 --ranks 2": Run(says="hybrid-shard"),
    "zero-mpi plan --layers 32 --dim 2048 --heads 16 --ranks 64 --nodes 8 --memory 64G": Run(
        "--layers 1 --dim 256 --memory 200M --strategy full-shard", "largest"
    ),
    "zero-mpi plan --layers 32 --dim 2048 --heads 16 --ranks-per-node 8 --sweep": Run(
        "--layers 1 --dim 256 --most-ranks 32", "32"
    ),
    "zero-mpi plan --layers 32 --dim 2048 --heads 16 --vocab-size 32000 --context 1024 "
    "--micro-batch 1 --batch-size 16384 --strategy hybrid-shard --sweep --ranks-per-node 8 "
    "--most-ranks 16384": Run(says=r"16384 \(2048\).* 99%"),
    "zero-mpi plan --layers 12 --dim 768 --heads 12 --context 512 --batch-size 32 --ranks 16 --nodes 4": Run(
        says="shard-grad-op"
    ),
    "zero-mpi plan --layers 12 --dim 768 --heads 12 --ranks 16 --nodes 4 --strategy hybrid-shard": Run(
        says="hybrid-shard"
    ),
    **{
        f"zero-mpi plan --strategy full-shard --recompute --context 1024 --micro-batch 1 {sizes} "
        "--lora 16 --base q4_0": ByTest(
            "tests/serial/test_plan_stored.py::test_the_table_of_the_page_is_planned"
        )
        for sizes in (
            "--batch-size 2 --ranks 2 --layers 30 --dim 576 --heads 9 --kv-heads 3 --ffn 1536 "
            "--vocab-size 49152 --tied",
            "--batch-size 2 --ranks 2 --layers 16 --dim 2048 --heads 32 --kv-heads 8 --ffn 8192 "
            "--vocab-size 128256 --tied",
            "--batch-size 4 --ranks 4 --nodes 4 --layers 32 --dim 4096 --heads 32 --kv-heads 8 --ffn 14336 "
            "--vocab-size 128256",
            "--batch-size 16 --ranks 16 --nodes 16 --layers 80 --dim 8192 --heads 64 --kv-heads 8 "
            "--ffn 28672 --vocab-size 128256",
        )
    },
    "zero-mpi plan --machine examples/machines/small.toml --ranks 8": Run(
        "--strategy full-shard", "saving a checkpoint"
    ),
    "zero-mpi plan --machine examples/machines/large.toml --sweep --strategy full-shard "
    "--precision bf16 --recompute --micro-batch 1 --batch-size 16384 --context 4096 --checkpoint-io parallel "
    "--layers 80 --dim 8192 --heads 64 --kv-heads 8 --ffn 28672 --vocab-size 128256": Run(
        "--layers 1 --dim 256 --heads 8 --kv-heads 8", "16384 "
    ),
    "zero-mpi plan --device cuda --precision bf16 --ranks 4 --memory 80G": Run(
        "--memory 200M --strategy full-shard", "full-shard"
    ),
}

PLACES: dict[str, How] = {
    "zero-mpi hostfile hostfiles/two_nodes.mpich --for openmpi > hosts": Run(),
    "zero-mpi hostfile hostfiles/four_nodes.mpich --for openmpi": Run(says="node4 slots=2"),
    "zero-mpi hostfile hostfiles/four_nodes.openmpi --for mpich": Run(says="node4:2"),
    "scontrol show hostnames | zero-mpi hostfile - --for mpich > hosts": ByTest(
        "tests/serial/test_hostfiles.py::test_one_form_becomes_the_other"
    ),
    'mpirun --hostfile hosts -n 4 "$(command -v python)" -m zero_mpi.train --out /shared/run': OVER_HOSTS,
    "zero-mpi supervise -- mpirun -n 8 python -m zero_mpi.train --config run.toml --out runs/default": ByTest(
        "tests/serial/test_supervise.py::"
        "test_a_job_whose_rank_is_killed_ends_done_with_the_bytes_of_one_that_nothing_disturbed"
    ),
    "zero-mpi supervise --hostfile hosts --spare 1 -- mpirun -f {hostfile} -n {ranks} "
    "python -m zero_mpi.train --out /shared/run": ByTest(
        "tests/cluster/test_supervised_hosts.py::"
        "test_a_run_loses_a_rank_a_host_and_one_that_hangs_and_is_done"
    ),
    'LAUNCH="zero-mpi supervise -- srun --mpi=pmi2 -w {hosts} -N {nodes} -n {ranks}" sbatch --no-kill '
    "--nodes=4 examples/slurm/many_nodes.sbatch --config run.toml --out /shared/run": ByTest(
        "tests/cluster/test_slurm_hosts.py::test_a_job_goes_on_without_a_node_that_is_lost"
    ),
    'SUPERVISE="zero-mpi supervise --for mpich --" FLAGS="--config run.toml --out /shared/run" '
    "qsub -l select=4:ncpus=8:mpiprocs=8 examples/pbs/many_nodes.pbs": ByTest(
        f"{BATCH}test_a_supervised_pbs_job_goes_on_without_a_host"
    ),
    'mpirun --hostfile hosts -n 4 "$(command -v python)" -m zero_mpi doctor --out /shared/run '
    "--json doctor.json": ByTest("tests/cluster/test_doctor_hosts.py::test_hosts_and_the_link_between_them"),
    "mpiexec -f hostfiles/two_nodes.mpich -n 4 python -m zero_mpi.train --out /shared/run": OVER_HOSTS,
    "mpiexec -f hostfiles/four_nodes.mpich -n 8 python -m zero_mpi.train --out /shared/run": OVER_HOSTS,
    'mpirun --hostfile hostfiles/two_nodes.openmpi -n 4 "$(command -v python)" -m zero_mpi.train '
    "--out /shared/run": OVER_HOSTS,
    'mpirun --hostfile hostfiles/four_nodes.openmpi -n 8 "$(command -v python)" -m zero_mpi.train '
    "--out /shared/run": OVER_HOSTS,
    "mpiexec -f hostfiles/local8 -n 8 python -m zero_mpi.train": ByTest(
        "tests/serial/test_hostfiles.py::test_local8_runs_ranks_on_this_machine"
    ),
    "mpirun --hostfile hostfiles/local8 -n 8 python -m zero_mpi.train": ByTest(
        "tests/serial/test_hostfiles.py::test_local8_runs_ranks_on_this_machine"
    ),
    "sbatch examples/slurm/one_node.sbatch --data TEXT --out /shared/run": ByTest(
        f"{SLURM}test_a_job_told_to_stop_saves_is_requeued_and_goes_on"
    ),
    "sbatch --nodes=4 examples/slurm/many_nodes.sbatch --config run.toml --out /shared/run": ByTest(
        f"{SLURM}test_slurm_takes_the_header_of_every_script"  # the Slurm of the tests has one node
    ),
    "sbatch --array=1-20%1 examples/slurm/array.sbatch --config run.toml --out /shared/run": ByTest(
        f"{SLURM}test_the_tasks_of_an_array_go_on_one_after_the_other"
    ),
    'FLAGS="--data TEXT --out /shared/run" qsub examples/pbs/one_node.pbs': PBS,
    'FLAGS="--config run.toml --out /shared/run" qsub -l select=4:ncpus=8:mpiprocs=8 '
    "examples/pbs/many_nodes.pbs": PBS,
    'FLAGS="--config run.toml --out /shared/run" qsub -J 1-20%1 examples/pbs/array.pbs': PBS,
    "mpirun -n 4 python -m zero_mpi.train --device cuda --precision bf16 --out run": ByTest(
        "tests/gpu/test_training.py::test_bits_are_those_of_one_rank"  # on a CuPy without a GPU
    ),
    "python3 benchmarks/gpu_check.py --out report --venv /tmp/zero_mpi --torch-python python3": ByTest(
        "tests/serial/test_gpu_check.py::test_the_parts_that_need_no_gpu"
    ),
}

MEASURING: dict[str, How] = {
    "python benchmarks/peers.py --workload W3 --rounds 3 --steps 50 --torch-python PYTHON": NO_TORCH,
    "python benchmarks/peers.py --workload W1 --rounds 2 --steps 6 --torch-python PYTHON": NO_TORCH,
    "python benchmarks/peers.py --workload W2 --rounds 1 --steps 4 --torch-python PYTHON": NO_TORCH,
    "python benchmarks/ops.py --repeats 8": Nobody("a minute of large products, and times are no test"),
    "python benchmarks/losses.py --workload W3 W1 --ranks 1": ByTest(
        f"{BENCHMARKS}test_losses_of_two_precisions_are_compared"
    ),
    "python benchmarks/step.py --workload W1 --threads 2 --precision fp32 bf16 --rounds 2 --steps 3": ByTest(
        f"{BENCHMARKS}test_steps_are_timed_for_each_variant"
    ),
    "python benchmarks/overlap.py --rate 1gbit": ByTest(
        f"{HOSTS}test_most_of_the_transfers_hide_behind_computation"
    ),
    "python benchmarks/step_hosts.py --steps 12 -- --workload W3": SPEED,
    "python benchmarks/plan_check.py --steps 3": SPEED,
    "python benchmarks/plan_scale.py": SPEED,
    "python benchmarks/scaling.py": ByTest(f"{BENCHMARKS}test_sizes_are_swept"),
    "mpirun -n 4 python benchmarks/checkpoint.py --mb 512 --repeats 7 --folder DIR": ByTest(
        f"{BENCHMARKS}test_checkpoint_prints_its_table_and_leaves_nothing_behind"
    ),
    "mpirun -n 4 python benchmarks/checkpoint_calls.py --mb 24 --ranks-per-node 2 --system lustre": ByTest(
        f"{BENCHMARKS}test_calls_of_a_checkpoint_are_counted"
    ),
    "taskset -c 0 python benchmarks/encode.py": ByTest(f"{BENCHMARKS}test_tokenizers_are_timed"),
    "taskset -c 0 python benchmarks/encode.py --lines": ByTest(f"{BENCHMARKS}test_tokenizers_are_timed"),
    "python benchmarks/qat.py MODEL.gguf": Nobody("minutes of training, and its parts are test_qat.py's"),
    "python benchmarks/conversations.py MODEL.gguf": ByTest(f"{BENCHMARKS}test_conversations_are_timed"),
}

OBSERVING: dict[str, How] = {
    "mpirun -n 2 python -m zero_mpi.train --steps 60 --log-every 10 --save-every 30 --out runs/seen "
    "--tensorboard --trace runs/seen/trace.json.gz --trace-steps 10:13": Run(
        f"{TINY} --steps 60", r"step 20/60 .*(?s:.)*step-0*60 in"
    ),
    "cat runs/seen/status.json": Run(says='"state": "done"'),
    "tail -n 1 runs/seen/metrics.jsonl": Run(says='"step": 60, .*"memory_bytes"'),
    "cat runs/seen/events.jsonl": Run(says='"started"(?s:.)*"saved"(?s:.)*"sample"(?s:.)*"done"'),
    "zero-mpi report runs/seen": Run(says="wrote runs/seen/report.html"),
    "mpirun -n 3 python -m zero_mpi.train --steps 60 --lr 2e-3 --out runs/slower": Run(TINY, SAVED),
    "zero-mpi report runs/seen runs/slower --out both.html": Run(says="wrote both.html"),
    "zero-mpi trace runs/seen/trace.json.gz": Run(says="steps 10 to 12 of 2 ranks"),
}

OWN: dict[str, How] = {
    "python check.py": Run(says="measured (-?[0-9.]+), backward says \\1"),
    "mpirun -n 1 python train_scale.py > one.txt": Run(),
    "mpirun -n 3 python train_scale.py > three.txt": Run(),
    "cmp one.txt three.txt": Run(),
    "tail -n 3 three.txt": Run(says="the layer has learned"),
    "mpirun -n 2 python scaled.py --arch scaled-llama --layers 2 --dim 64 --heads 4 --steps 40 "
    "--out runs/scaled": Run(f"{TINY} --steps 4", "scaled-llama"),
    "mpirun -n 3 python scaled.py --arch scaled-llama --layers 2 --dim 64 --heads 4 --steps 50 "
    "--out runs/scaled": Run(f"{TINY} --steps 6", "at step 4"),
    'python -c "import scaled; from zero_mpi.commands.generate.command import main; main()" runs/scaled/'
    "latest --tokens 40": Run(says="def "),
    "mpirun -n 1 python compare.py": Run(says="the same bits"),
    "mpirun -n 3 python compare.py": Run(says="the same bits"),
    "mpirun -n 3 python examples/custom_loop.py": EXAMPLE,
    "mpirun -n 3 python examples/custom_model.py": EXAMPLE,
    "mpirun -n 3 python examples/mlp_digits.py": EXAMPLE,
    "mpirun -n 3 python examples/lion.py": EXAMPLE,
    "mpirun -n 3 python examples/save_and_load.py": EXAMPLE,
    "mpirun -n 3 python examples/save_and_load.py halfway": HALVES,
    "mpirun -n 2 python examples/save_and_load.py halfway": HALVES,
    "mpirun -n 3 python examples/mlp_ddp.py": EXAMPLE,
    "mpirun -n 3 python examples/sharded_linear.py": EXAMPLE,
    "mpirun -n 2 python examples/finetune_smollm2.py": ByTest(REAL_MODEL),
    "mpirun -n 2 python examples/preferences.py": ByTest(
        "tests/serial/test_finetune.py::test_the_example_of_preferences_shows_what_was_gained"
    ),
}

COMMANDS = STARTING | TRAINING | EVALUATING | LOOKING | PLANNING | PLACES | MEASURING | OBSERVING | OWN
COMMANDS |= MAKING
