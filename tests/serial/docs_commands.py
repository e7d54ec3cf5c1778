"""Table for test_docs.py: beginning of a documented command line -> how the command is tested.

The longest matching row applies. A command without a row runs as documented, with a small model. `Run`: run
by test_docs.py in the order of the page, in one folder per page; `add` has flags that make it small (they
come last, so they win), `says` is the expected output; 8 and 4 ranks become 2. `Make`: run the output of
`make -n`. `ByTest`: a test runs it, maybe with smaller sizes. `Suite`: `.ci/run` runs it. `Nobody`: no test
runs it; `why` says so.
"""

from dataclasses import dataclass

SMALL = (
    "--layers 1 --dim 32 --heads 2 --context 32 --batch-size 4 --micro-batch 1 --eval-windows 4 --sample 10"
)
TINY = f"{SMALL} --steps 6 --warmup 2 --data my-texts"
TUNED = "--steps 3 --batch-size 2 --micro-batch 1 --eval-windows 2 --sample 10"


@dataclass(frozen=True)
class Run:
    add: str = ""
    says: str = ""
    statuses: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Make:
    """Target whose only command after the set-up is `prints`, which the test runs."""

    prints: str
    add: str
    says: str = ""


@dataclass(frozen=True)
class ByTest:
    """Command that `file::test` runs; for a target of make, its command is `prints`."""

    test: str
    prints: str = ""


@dataclass(frozen=True)
class Suite:
    in_ci: str


@dataclass(frozen=True)
class Nobody:
    why: str


How = Run | Make | ByTest | Suite | Nobody


def of(folder: str, name: str) -> ByTest:
    return ByTest(f"tests/{folder}.py::test_{name}")


TRAIN = "python -m zero_mpi.train"
SAVED = r"saved runs/\w+/step-0*\d+ in .* state [0-9a-f]{16}"
OVER_HOSTS = of("cluster/test_hosts", "same_bytes_as_in_one_process")
PBS = of("serial/test_batch", "a_pbs_job_told_to_stop_is_followed_by_one_that_goes_on")
FINETUNE = "the_example_teaches_answers_and_shows_what_was_gained"
HALVES = of("serial/test_examples", "each_half_of_a_run_may_have_its_own_number_of_ranks")
MIXTURE = of("serial/test_lora_files", "base_with_adapter_is_the_merged_model_and_llama_cpps")
SAME_BYTES = of("serial/test_quantize", "bytes_are_the_same_on_three_ranks")
DISTILLED = of("serial/test_distill", "predictions_and_what_is_learned_from_them_are_the_same_on_any_ranks")
LOCAL = of("serial/test_hostfiles", "local8_runs_ranks_on_this_machine")
BY_HAND = (
    "peers",
    "conversations",
    "finetune",
    "ops",
    "generate",
    "step_hosts",
    "plan_check",
    "plan_scale",
    "qat",
)
SPEED = Nobody("it measures speed and is run by hand")
PROVED = f"{TINY} --steps 12 --save-every 4"

ROWS: dict[str, How] = {
    "make train": Make(f"mpirun -n 8 {TRAIN}", TINY, SAVED),
    "make train N=4": Make(f"mpirun -n 4 {TRAIN} --steps 50 --out runs/short", TINY, SAVED),
    "make finetune": ByTest(
        f"tests/serial/test_finetune.py::test_{FINETUNE}", "mpirun -n 2 python examples/finetune_smollm2.py"
    ),
    "make check": Suite("make -k check"),
    "make test": Suite("make test"),
    "make test-all": Nobody("`.ci/run --long` runs it, in about an hour"),
    "make docs": Suite("make docs"),
    "pip install": Nobody("make installs the package with these extras"),
    "mpiexec -n 4 python -m pytest": Suite("make test"),
    ".venv/bin/": Suite("make test"),
    ".venv/bin/python tests/random_kills.py": of(
        "serial/test_kills", "random_kills_of_ranks_launcher_and_job_lose_nothing"
    ),
    # ------------------------------------------------------------------------------------------ training
    f"mpirun -n 3 {TRAIN} --steps 500": Run(f"{TINY} --steps 9", "resuming from .* at step 6"),
    f"mpirun -n 4 {TRAIN} --help": Run(says="--strategy"),
    f"mpirun -n 8 {TRAIN} --help-all": Run(says="--writers-per-node"),
    f"mpirun -n 4 {TRAIN} --config runs/larger/config.toml": Run("--steps 3", SAVED),
    f"mpirun -n 4 {TRAIN} --data my-texts --context 256": Run(f"{TINY} --context 64", SAVED),
    f"mpirun -n 2 {TRAIN} --dry-run": Run(says="MiB"),
    f"mpirun -n 2 {TRAIN} --init MODEL.gguf --data my-texts": Run(TUNED, SAVED),
    f"mpirun -n 2 {TRAIN} --init MODEL.gguf --lora 8 --data my-texts": Run(TUNED, SAVED),
    f"mpirun -n 4 {TRAIN} --save-every 20 --keep 2": Run(
        f"{TINY} --steps 100", "step-00000080 .*(?s:.)*step-00000100 "
    ),
    f"mpirun -n 2 {TRAIN} --steps 400 --eval-every 20 --patience 3": Run(
        f"{TINY} --eval-every 2", "best validation loss is .*: runs/patient/best"
    ),
    f"mpirun -n 4 {TRAIN} --steps 60 --save-every 20 --out runs/proved": Run(PROVED, "proof: [0-9a-f]{64}"),
    f"mpirun -n 2 {TRAIN} --steps 60 --save-every 20 --seed 1": Run(PROVED),
    f"mpirun -n 3 {TRAIN} --steps 120 --out runs/saved": Run(
        f"{TINY} --steps 103", "resuming from .*step-00000100 at step 100"
    ),
    f"mpirun -n 2 {TRAIN} --steps 120 --out runs/again": Run(f"{TINY} --steps 103", "at step 100"),
    f"mpirun -n 2 {TRAIN} --bits portable": of(
        "serial/test_portable", "unlike_hosts_train_together_and_a_resume_keeps_the_bits"
    ),
    f"mpirun -n 8 {TRAIN} --data tokens": Run(f"{SMALL} --steps 6 --warmup 2", SAVED),
    f"mpirun -n 2 {TRAIN} --init MODEL.gguf --lora 8 --loss dpo": of(
        "serial/test_preference_runs", "ranks_and_a_resume_change_no_bit_and_it_is_verified"
    ),
    f"mpirun -n 2 {TRAIN} --data my-texts --tokenizer TEACHER.gguf": DISTILLED,
    f"mpirun -n 2 {TRAIN} --init MODEL.gguf --data chat.jsonl": of(
        "serial/test_defaults", "conversations_beside_a_model_decide_what_no_flag_says"
    ),
    f"mpirun -n 2 {TRAIN} --arch qwen3moe": Run(f"{TINY} --out runs/mixture", "validation loss"),
    f"mpirun -n 2 {TRAIN} --init MIXTURE.gguf": MIXTURE,
    "mpirun -n 8 zero-mpi train --init model.gguf": of(
        "serial/test_qat", "bits_are_the_same_on_any_ranks_and_after_a_resume"
    ),
    f"mpirun -n 4 {TRAIN} --device cuda": of("gpu/test_training", "bits_are_those_of_one_rank"),
    f"mpirun -n 2 {TRAIN} --steps 60 --log-every 10": Run(
        f"{TINY} --steps 60", r"step 20/60 .*(?s:.)*step-0*60 in"
    ),
    # ------------------------------------------------------------------------------------------- looking
    "mpirun -n 3 zero-mpi tokenize pages.jsonl.zst": of("serial/test_tokenize", "documents_of_each_format"),
    "mpirun -n 2 zero-mpi evaluate TEACHER.gguf": DISTILLED,
    "mpirun -n 2 zero-mpi evaluate MODEL.gguf --data": Run("--context 64", "nats/token"),
    "mpirun -n 2 zero-mpi evaluate MODEL.gguf --data my-texts --context 128 --stride": Run(
        "--context 64 --stride 32", "a new one every 32"
    ),
    "zero-mpi evaluate runs/tuned/latest": of(
        "serial/test_evaluate", "a_second_model_reads_the_same_windows"
    ),
    "zero-mpi evaluate MODEL.gguf --lora": of("serial/test_lora", "evaluate_takes_an_adapter_with_its_base"),
    "mpirun -n 2 zero-mpi evaluate MODEL.gguf --choices": of(
        "serial/test_evaluate", "answers_have_the_likelihood_of_their_tokens"
    ),
    "mpirun -n 2 zero-mpi evaluate MODEL.gguf --task": of(
        "serial/test_task_files", "shares_and_log_likelihoods_are_lm_evals"
    ),
    "mpirun -n 2 zero-mpi evaluate MODEL.gguf --task core": of("serial/test_task_files", "core_is_nanochats"),
    "mpirun -n 8 zero-mpi evaluate model-q4.gguf": of(
        "serial/test_evaluate", "divergence_is_that_of_the_logits_on_any_ranks"
    ),
    "mpirun -n 8 zero-mpi evaluate model.gguf": of(
        "serial/test_evaluate", "an_importance_matrix_has_the_squares_of_all_inputs"
    ),
    "zero-mpi samples MODEL.gguf --data pairs.jsonl": of(
        "serial/test_preference_runs", "samples_shows_both_sides_of_a_pair"
    ),
    "zero-mpi samples MODEL.gguf --data chat.jsonl": of(
        "serial/test_samples", "all_counts_and_another_template"
    ),
    "ls runs/saved": Run(says="step-00000080\nstep-00000100\n"),
    "tail -n 1 runs/default/metrics.jsonl": Run(says='"step": 6, .*"val_loss"'),
    "zero-mpi inspect runs/proved runs/other": Run(says="same +no", statuses=(1,)),
    "zero-mpi inspect runs/saved/latest runs/again/latest": Run(says="same +yes"),
    "zero-mpi inspect runs/one/latest runs/three/latest": Run(says="same +yes"),
    "mpirun -n 3 zero-mpi verify runs/proved": Run(says="yes: .* steps 1-12 have the same bits, .* 3 ranks"),
    "zero-mpi verify runs/proved --from 20 --to 40": Run("--from 4 --to 8", "yes: .* steps 5-8"),
    "zero-mpi generate MODEL.gguf --chat": of(
        "serial/test_chat", "a_prompt_is_answered_by_the_template_up_to_the_end"
    ),
    "zero-mpi export runs/default/latest model-q4.gguf": of(
        "serial/test_qat", "a_checkpoint_and_its_export_hold_rounded_weights"
    ),
    "zero-mpi export model.gguf model-q2.gguf": SAME_BYTES,
    "mpirun -n 8 zero-mpi export runs/default/latest model.gguf": SAME_BYTES,
    "cat runs/seen/events.jsonl": Run(says='"started"(?s:.)*"saved"(?s:.)*"sample"(?s:.)*"done"'),
    "zero-mpi trace runs/seen/trace.json.gz": Run(says="steps 10 to 12 of 2 ranks"),
    # --------------------------------------------------------------------------------- planning, places
    # The doctor may find the test machine unsuitable.
    "mpirun -n 2 zero-mpi doctor --out": Run("--quick", "transport|MPI", statuses=(0, 1)),
    "mpirun -n 2 zero-mpi doctor --quick": of("serial/test_doctor", "rows_are_true"),
    "zero-mpi plan --arch qwen3moe": Run("--strategy full-shard", "12.4 GiB"),
    "zero-mpi plan --init MODEL.gguf --context 128 --batch-size 64": Run(
        "--memory 50M --strategy full-shard"
    ),
    "zero-mpi plan --layers 32 --dim 2048 --heads 16 --ranks 64": Run(
        "--layers 1 --dim 256 --memory 200M --strategy full-shard", "largest"
    ),
    "zero-mpi plan --layers 32 --dim 2048 --heads 16 --batch-size 1024 --ranks-per-node 8": Run(
        "--layers 1 --dim 256 --most-ranks 32", "32"
    ),
    "zero-mpi plan --layers 32 --dim 2048 --heads 16 --vocab-size": Run(says=r"16384 \(2048\).* 99%"),
    "zero-mpi plan --strategy full-shard": of("serial/test_plan", "the_table_of_the_page_is_planned"),
    "zero-mpi plan --machine examples/machines/small.toml": Run("--strategy full-shard"),
    "zero-mpi plan --machine examples/machines/large.toml": Run(
        "--layers 1 --dim 256 --heads 8 --kv-heads 8", "16384 "
    ),
    "zero-mpi plan --device cuda": Run("--memory 200M --strategy full-shard", "full-shard"),
    "scontrol": of("serial/test_hostfiles", "one_form_becomes_the_other"),
    "zero-mpi supervise -- mpirun": of(
        "serial/test_supervise",
        "a_job_whose_rank_is_killed_ends_done_with_the_bytes_of_one_that_nothing_disturbed",
    ),
    "zero-mpi supervise --hostfile": of(
        "cluster/test_supervised_hosts", "a_run_loses_a_rank_a_host_and_one_that_hangs_and_is_done"
    ),
    "LAUNCH=": of("cluster/test_slurm_hosts", "a_job_goes_on_without_a_node_that_is_lost"),
    "SUPERVISE=": of("serial/test_batch", "a_supervised_pbs_job_goes_on_without_a_host"),
    'mpirun --hostfile hosts -n 4 "$(command -v python)" -m zero_mpi doctor': of(
        "cluster/test_doctor_hosts", "hosts_and_the_link_between_them"
    ),
    "mpirun --hostfile": OVER_HOSTS,
    "mpiexec -f": OVER_HOSTS,
    "mpirun --hostfile hostfiles/local8": LOCAL,
    "mpiexec -f hostfiles/local8": LOCAL,
    "sbatch examples/slurm/one_node.sbatch": of(
        "cluster/test_slurm", "a_job_told_to_stop_saves_is_requeued_and_goes_on"
    ),
    "sbatch --nodes=4": of(  # the Slurm of the tests has one node
        "cluster/test_slurm", "slurm_takes_the_header_of_every_script"
    ),
    "sbatch --array": of("cluster/test_slurm", "the_tasks_of_an_array_go_on_one_after_the_other"),
    "FLAGS=": PBS,
    # ------------------------------------------------------------------------------ benchmarks, examples
    "python3 benchmarks/gpu_check.py": of("serial/test_gpu_check", "the_parts_that_need_no_gpu"),
    "python benchmarks/gpu_first.py": of("serial/test_gpu_check", "the_parts_that_need_no_gpu"),
    **dict.fromkeys(map("python benchmarks/{}.py".format, BY_HAND), SPEED),
    "python benchmarks/losses.py": Run(
        "--workload W3 --steps 3 -- --data my-texts --layers 1 --eval-windows 2", r"at most 0\.00\d+ apart"
    ),
    "python benchmarks/step.py": Run(
        "--workload W3 --layers 1 --steps 2 --warmup 1 --rounds 1", "fp32 (?s:.)*bf16 "
    ),
    "python benchmarks/overlap.py": of("cluster/test_hosts", "most_of_the_transfers_hide_behind_computation"),
    "mpirun -n 4 python benchmarks/checkpoint.py": Run(
        "--mb 0.5 --repeats 2 --folder . --warm-memory", "load, cache dropped"
    ),
    "mpirun -n 4 python benchmarks/checkpoint_calls.py": Run("--mb 0.5 --folder .", "pwritev"),
    "taskset -c 0 python benchmarks/encode.py": Run(
        "--megabytes 0 --vocabulary 500 --rounds 1", r"ratio +\d+\.\d\d; (\d+) and \1 ids"
    ),
    "python check.py": Run(says="relative error of backward: [0-9]e-(0[7-9]|1[0-9])"),
    "mpirun -n 2 python scaled.py": Run(f"{TINY} --steps 4", "scaled-llama"),
    "mpirun -n 3 python scaled.py": Run(f"{TINY} --steps 6", "at step 4"),
    "mpirun -n 3 python examples/": of("serial/test_examples", "example_lowers_its_loss"),
    "mpirun -n 3 python examples/save_and_load.py halfway": HALVES,
    "mpirun -n 2 python examples/save_and_load.py halfway": HALVES,
    "mpirun -n 2 python examples/finetune_smollm2.py": of("serial/test_finetune", FINETUNE),
    "mpirun -n 2 python examples/preferences.py": of(
        "serial/test_finetune", "the_example_of_preferences_shows_what_was_gained"
    ),
}


def row_of(line: str) -> str:
    """Return the key of a line's row; "" if it has none."""
    return max((start for start in ROWS if line.startswith(start)), key=len, default="")


def how_of(line: str) -> How:
    return ROWS.get(row_of(line), Run(TINY if f" {TRAIN}" in line else ""))
