"""Flags of `zero_mpi.train`, as one data class: name, default, meaning and place in `--help`.

A TOML file (`--config`) sets the same names; flags on the command line win. `fixed` marks the settings that a
resumed run must keep, beside the sizes of its model, because another value would make it another run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero_mpi.comm.kinds import CHOICES
from zero_mpi.data.control_tokens import AUTO, BOS, READINGS
from zero_mpi.data.conversations.tokenized import LOSSES
from zero_mpi.data.packing import PACKINGS
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.models import ARCHITECTURES
from zero_mpi.models.lora import FROZEN, TARGETS, LoRA

FROM_NOTHING: dict[str, Any] = {"arch": "llama", "layers": 4, "dim": 192, "heads": 6, "lr": 4e-3}
FURTHER: dict[str, Any] = {"lr": 5e-5}  # the usual rate for all weights of a language model
ADAPTERS: dict[str, Any] = {"lr": 1e-3}  # and for adapters, which start from zero
LR_TIMES_WIDTH = 0.8  # largest rate of adapters, times the width: 2e-4 for a width of 4096, as is usual
LENGTH = {"steps", "epochs"}  # alternative settings of a run's length
STEPS: dict[str, Any] = {"steps": 440}  # for a model from scratch without --epochs
ANY: dict[str, Any] = {"context": 128, "batch_size": 16, "warmup": "9%"}
EPOCHS, MOST_CONTEXT = 3, 1024  # for conversations
FEW_WINDOWS = 214  # with fewer windows a batch is smaller, down to 4, so that three epochs are 40 steps


def batch_size(windows: int) -> int:
    """Return the default for so many windows of conversations; the number of ranks does not matter."""
    return 16 if windows >= FEW_WINDOWS else 8 if 2 * windows >= FEW_WINDOWS else 4


def told(name: str) -> str:
    """Return the `--help` text of a setting in the tables above; empty for another."""
    if name in ANY:
        return f" (default: {ANY[name]}{'' if name == 'warmup' else '; with --init by the conversations'})"
    if name not in FROM_NOTHING:
        return ""
    lora = f", with --lora {ADAPTERS[name]} or {LR_TIMES_WIDTH} / width" if name in ADAPTERS else ""
    return f" (default: {FROM_NOTHING[name]}; with --init {FURTHER.get(name, 'that of the model')}{lora})"


def step_range(text: str | None, steps: int | None) -> tuple[int, int] | None:
    """Return `--trace-steps` as (first, stop), within `steps` if known; None if not given. UsageError."""
    if text is None:
        return None
    found, given = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text), f"--trace-steps {shown(text)}"
    if not found or not 1 <= int(found[1]) < int(found[2]):
        raise UsageError(f"{given}: expected FIRST:STOP from 1 on; 10:13 is 10, 11 and 12")
    if steps is not None and int(found[1]) > steps:
        raise UsageError(f"{given}: expected a step of the run, which ends with --steps {steps}")
    return int(found[1]), int(found[2])


def warmup_steps(wanted: Any, steps: int | None) -> int:
    """Return `--warmup` as a number; a share stays text until `steps` are known. Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,18})|([0-9]{1,3}(?:\.[0-9]{1,9})?)%", str(wanted))
    if not found or float(found[2] or 0) > 100:
        raise UsageError(f"--warmup {shown(wanted)}: expected steps such as 40, or a share of all such as 5%")
    if found[1]:
        return int(found[1])
    share: int = wanted if steps is None else round(float(found[2]) / 100 * steps)
    return share


def flag(
    default: Any, kind: Any, group: str, text: str, *, fixed: bool = False, choices: Sequence[str] = ()
) -> Any:
    """Return a field of the configuration; `kind` is int, float, str, bool or list."""
    about = {"kind": kind, "group": group, "text": text, "fixed": fixed, "choices": tuple(choices)}
    if kind is list:
        return dataclasses.field(default_factory=list, metadata=about)
    return dataclasses.field(default=default, metadata=about)


@dataclass
class Config:
    """All settings of a run. None means: derived from the others.

    `steps` is None, and `warmup` may be a share of it, until the data are read (`config.epochs.in_steps`).
    `unsaid`: the settings whose default may differ for a run that continues, or by its data.
    """

    removed = tuple[str, ...]()  # settings of --config that 0.1.0 had; not annotated, so it is no field

    out: str = flag("runs/default", str, "run", "run directory")
    steps: int = flag(None, int, "run", "optimizer steps (default: 440; conversations with --init: 3 epochs)")
    epochs: int | None = flag(None, int, "run", "times through the data, instead of --steps")
    seed: int = flag(0, int, "run", "of the first weights and the order of data", fixed=True)
    resume: str = flag("auto", str, "run", "auto: newest in OUT; never; or a folder")
    dry_run: bool = flag(False, bool, "run", "say what the run would take and do, and stop")
    sample: int = flag(400, int, "run", "tokens of text to show at the end; 0: none")
    prompt: str = flag("def ", str, "run", "what that text continues")

    arch: str | None = flag(None, str, "model", "architecture", choices=tuple(ARCHITECTURES))
    layers: int | None = flag(None, int, "model", "blocks")
    dim: int | None = flag(None, int, "model", "width")
    heads: int | None = flag(None, int, "model", "query heads")
    kv_heads: int | None = flag(None, int, "model", "key/value heads (default: as many as heads)")
    ffn: int | None = flag(None, int, "model", "feed-forward width (default: by architecture)")
    experts: int | None = flag(None, int, "model", "experts of each feed-forward (default: no mixture)")
    experts_used: int | None = flag(None, int, "model", "experts that each token uses (default: 2)")
    expert_ffn: int | None = flag(None, int, "model", "width of an expert (default: --ffn)")
    context: int = flag(None, int, "model", "tokens per training window", fixed=True)
    tied: bool | None = flag(None, bool, "model", "head tied to the embedding (default: gpt2)")
    vocab_size: int | None = flag(None, int, "model", "vocabulary, for token files")
    init: str | None = flag(None, str, "model", "GGUF or safetensors folder to start from instead")
    freeze: list[str] = flag(
        None, list, "model", "parameters to leave as they are, by their names", fixed=True
    )

    lora: int | None = flag(
        None, int, "adapter", "train adapters of this rank and leave the model of --init as it is", fixed=True
    )
    lora_alpha: float | None = flag(
        None, float, "adapter", "products count alpha / rank times (default: twice the rank)", fixed=True
    )
    lora_targets: list[str] = flag(
        None,
        list,
        "adapter",
        "weights that have one, by their names (default: blk.*.attn_*.weight blk.*.ffn_*.weight)",
        fixed=True,
    )
    lora_init: str | None = flag(None, str, "adapter", "adapter.gguf to go on from, of the same rank")

    data: list[str] = flag(
        None,
        list,
        "data",
        "text, token files, or conversations as .jsonl; PATH=SHARE mixes (default: Python's library)",
    )
    tokenizer: str | None = flag(None, str, "data", "byte, from-init (default with --init), or a file")
    control_tokens: str | None = flag(
        None,
        str,
        "data",
        "what text means that spells one, as <|im_start|>: parse: the token; plain: the letters (default: "
        "plain, with a warning)",
        choices=READINGS,
    )
    bos: str = flag(
        AUTO,
        str,
        "data",
        "bos token in front of each window of text and each conversation; auto: if the model asks for one",
        fixed=True,
        choices=BOS,
    )
    chat_template: str | None = flag(
        None, str, "data", "Jinja file, or name of one of the tokenizer's templates, for conversations"
    )
    template_var: list[str] = flag(
        None, list, "data", "NAME=VALUE: variables of the chat template; a value is JSON or text"
    )
    enable_thinking: str | None = flag(
        None, str, "data", "that variable of the chat template", choices=("true", "false")
    )
    system: str | None = flag(None, str, "data", "system message of conversations that have none")
    template_date: str | None = flag(
        None, str, "data", "day for the template's strftime_now, as 2024-07-26 (default: of the beginning)"
    )
    loss_on: str | None = flag(
        None,
        str,
        "data",
        "what counts of conversations: answers, those of the assistant; all (default: answers)",
        choices=LOSSES,
    )
    skip_bad: bool = flag(False, bool, "data", "leave out rows of conversations that cannot be read")
    packing: str | None = flag(
        None,
        str,
        "data",
        "documents: windows hold whole ones, which do not see each other; none: text runs on from window to "
        "window, a conversation has one of its own (default: none for text, documents for conversations)",
        fixed=True,
        choices=PACKINGS,
    )
    val_fraction: float = flag(0.05, float, "data", "of the documents to hold out; 0: none", fixed=True)
    val_data: list[str] = flag(None, list, "data", "what to hold out instead, as --data")

    batch_size: int = flag(None, int, "batch", "sequences per step over all ranks", fixed=True)
    micro_batch: int = flag(2, int, "batch", "sequences per forward", fixed=True)

    lr: float = flag(None, float, "optimizer", "learning rate after the warm-up")
    min_lr: float | None = flag(None, float, "optimizer", "learning rate at the end (default: lr / 10)")
    warmup: int = flag(None, str, "optimizer", "steps of linear warm-up, or a share of all")
    schedule: str = flag(
        "cosine",
        str,
        "optimizer",
        "decay; wsd: at the end alone",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    decay_steps: int | None = flag(
        None, int, "optimizer", "last steps, in which wsd falls linearly (default: a tenth of all)"
    )
    lr_scale: list[str] = flag(
        None, list, "optimizer", "learning rate times X where names match; the last match wins"
    )
    optimizer: str = flag(
        "adamw",
        str,
        "optimizer",
        "adamw; or muon: for the matrices of blocks, adamw for the rest; --lr and --weight-decay serve both",
        choices=("adamw", "muon"),
        fixed=True,
    )
    weight_decay: float = flag(0.1, float, "optimizer", "decay of matrices")
    beta1: float = flag(0.9, float, "optimizer", "decay of the first moment")
    beta2: float = flag(0.95, float, "optimizer", "decay of the second moment")
    eps: float = flag(1e-8, float, "optimizer", "added to the second moment's root")
    ema: float | None = flag(
        None, float, "optimizer", "keep an average of the parameters too: X of it stay each step", fixed=True
    )
    grad_clip: float = flag(1.0, float, "optimizer", "largest norm of the gradient; 0: any")

    strategy: str = flag(
        "full-shard",
        str,
        "sharding",
        "what is sharded; hybrid-shard: full-shard inside a node",
        choices=("full-shard", "shard-grad-op", "no-shard", "hybrid-shard"),
    )
    bucket_mb: float = flag(25.0, float, "sharding", "MiB per bucket of no-shard")
    prefetch: int | None = flag(
        None, int, "sharding", "stages to gather parameters ahead (default: 1; 2 with --device cuda)"
    )
    recompute: bool = flag(False, bool, "sharding", "keep only each block's input for backward")
    reduction: str = flag(
        "exact", str, "sharding", "exact: same bits on any ranks; or fast", choices=("exact", "fast")
    )
    transport: str = flag(
        "auto",
        str,
        "sharding",
        "mpi: messages; shared: memory that the ranks of a node share; auto: shared where it is possible. "
        "On a GPU, mpi: straight from it; staged: through host memory; nccl; auto: mpi where MPI can do it",
        choices=CHOICES,
    )
    device: str = flag("auto", str, "machine", "where arrays live", choices=("auto", "cpu", "cuda"))
    precision: str = flag("fp32", str, "machine", "of what is computed", choices=("fp32", "bf16", "fp16"))
    reduce_dtype: str | None = flag(
        None, str, "machine", "of gradients on their way (default: --precision's)"
    )
    offload: str = flag(
        "none",
        str,
        "machine",
        "from the GPU to the host's memory: moments; or state, with the fp32 parameters of bf16",
        choices=("none", "moments", "state"),
    )
    bits: str = flag(
        None,
        str,
        "machine",
        "native: of the best code for the processor; portable: the same on any with AVX2, of Intel or AMD "
        "(default: native, or what ZERO_MPI_BITS says)",
        fixed=True,
        choices=portable.CHOICES,
    )
    threads: str | None = flag(None, str, "machine", "per rank, auto: its cores (default: 1)")

    save_every: int | None = flag(
        None, int, "records", "steps between checkpoints; 0: at the end only (default: every ten minutes)"
    )
    keep: int = flag(3, int, "records", "checkpoints to keep; 0: all")
    async_save: bool = flag(False, bool, "records", "go on training while a checkpoint is written")
    checkpoint_io: str = flag(
        "gather",
        str,
        "records",
        "gather: rank 0 writes; parallel: as many ranks as the file system is best served by",
        choices=("gather", "parallel"),
    )
    writers_per_node: int | None = flag(None, int, "records", "so many ranks of each node write (parallel)")
    eval_every: int = flag(110, int, "records", "steps between evaluations; 0: at the end")
    patience: int | None = flag(
        None, int, "records", "end after N evaluations without a new best, which OUT/best names"
    )
    eval_windows: int = flag(128, int, "records", "held-out windows per evaluation")
    log_every: int = flag(20, int, "records", "steps between lines where no progress bar is shown")
    log_level: str = flag(
        "info", str, "records", "least level of what is said", choices=("debug", "info", "warning", "error")
    )
    tensorboard: bool = flag(False, bool, "records", "TensorBoard's event files in OUT/tensorboard")
    prometheus: str | None = flag(
        None, str, "records", "folder of node_exporter's textfile collector, for a file of the newest numbers"
    )
    wandb: str | None = flag(None, str, "records", "project of Weights & Biases for the records")
    mlflow: str | None = flag(
        None, str, "records", "experiment of MLflow for the records (MLFLOW_TRACKING_URI says where)"
    )
    trace: str | None = flag(None, str, "records", "time line of all ranks to write: .json or .json.gz")
    trace_steps: str | None = flag(None, str, "records", "as 10:13, which is 10 to 12 (default: three)")
    timeout: float = flag(
        600.0, float, "records", "end the job after such seconds without progress; 0: never"
    )
    check_collectives: bool = flag(False, bool, "records", "compare ranks before each collective: slow")
    max_time: str | None = flag(None, str, "records", "save and stop (status 75) within 3h50m, say")

    def __post_init__(self) -> None:
        self.bits = self.bits or portable.asked()
        self.unsaid = {name for name in ("lr", *LENGTH, *ANY) if getattr(self, name) is None}
        if self.init is None or not self.unsaid >= LENGTH:
            self.unsaid -= LENGTH
        steps = STEPS if self.init is None and self.epochs is None else {}
        begun = FROM_NOTHING if self.init is None else FURTHER if self.lora is None else ADAPTERS
        for name, value in (ANY | begun | steps).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.warmup = warmup_steps(self.warmup, self.steps)

    @property
    def adapters(self) -> LoRA | None:
        """Adapters that are trained, if any."""
        if self.lora is None:
            return None
        alpha = 2.0 * self.lora if self.lora_alpha is None else self.lora_alpha
        return LoRA(self.lora, alpha, tuple(self.lora_targets or TARGETS))

    @property
    def frozen(self) -> tuple[str, ...]:
        """Patterns of the parameters that are not trained."""
        return (*(self.freeze or ()), *(FROZEN if self.lora is not None else ()))

    def stages_ahead(self, on_gpu: bool) -> int:
        """Return how many stages ahead to gather parameters: a GPU's host launches a stage before it runs."""
        return 1 + on_gpu if self.prefetch is None else self.prefetch

    @property
    def holds_out(self) -> bool:
        """Tell whether anything is held out, hence evaluated."""
        return self.val_fraction > 0 or bool(self.val_data)

    def fixed(self) -> dict[str, Any]:
        """Return the settings that a resumed run must keep, beside the model's sizes."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["fixed"]}

    def plan(self) -> dict[str, Any]:
        """Return the settings that a resumed run may change, which changes the rest of the run."""
        names = [f.name for f in dataclasses.fields(self) if f.metadata["group"] == "optimizer"]
        return {name: value for name in ("steps", *names) if (value := getattr(self, name)) != []}


FIELDS = {field.name: field for field in dataclasses.fields(Config)}
ALIASES = {"learning_rate": "lr"}  # another name of a setting, as a flag and in a file


def spelled(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")
