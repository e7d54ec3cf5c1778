"""Settings of `zero_mpi.train` as one data class: name, default, meaning, and group in `--help`.

A TOML file (`--config`) sets them by the same names. Flags on the command line override the file. A resumed
run must keep the settings in `fixed` and the sizes of its model; with other values it would be another run.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero_mpi.checkpoint.mixes import QAT_TYPES
from zero_mpi.comm.kinds import CHOICES
from zero_mpi.data.conversations.tokenized import LOSSES
from zero_mpi.data.packing import PACKINGS
from zero_mpi.data.tokenizers.byte import AUTO, BOS, READINGS
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.models import ARCHITECTURES
from zero_mpi.models.lora import FROZEN, TARGETS, LoRA
from zero_mpi.nn.preference import PREFERENCES, Preference

FROM_NOTHING: dict[str, Any] = {"arch": "llama", "layers": 4, "dim": 192, "heads": 6, "lr": 4e-3}
FURTHER: dict[str, Any] = {"lr": 5e-5}  # usual rate for training all weights of a pretrained model
ADAPTERS: dict[str, Any] = {"lr": 1e-3}  # usual rate for adapters, which start from zero
LR_TIMES_WIDTH = 0.8  # limit on (rate of adapters) * width, from the usual rate 2e-4 at width 4096
CROSS_ENTROPY = "cross-entropy"
BYTE, FROM_INIT = "byte", "from-init"  # values of --tokenizer that are not files
OF_TEMPLATES = ("chat_template", "template_var", "enable_thinking", "template_date")
LENGTH = {"steps", "epochs"}  # the two settings for the length of a run; a run uses one of them
STEPS: dict[str, Any] = {"steps": 440}  # default for a model from scratch without --epochs
ANY: dict[str, Any] = {"context": 128, "batch_size": 16, "warmup": "9%"}
EPOCHS, MOST_CONTEXT = 3, 1024  # defaults for conversations: epochs, and maximum context in tokens
FEW_WINDOWS = 214  # below this, the batch is halved, at most twice, to keep 3 epochs at 40 steps or more


def batch_size(windows: int) -> int:
    """Return the default batch size for a number of windows of conversations, at any number of ranks."""
    return 16 if windows >= FEW_WINDOWS else 8 if 2 * windows >= FEW_WINDOWS else 4


def default_text(name: str) -> str:
    """Return the text of `--help` on a default in the tables above; "" for all other settings."""
    if name in ANY:
        return f" (default: {ANY[name]}{'' if name == 'warmup' else ', or chosen for the conversations'})"
    if name not in FROM_NOTHING:
        return ""
    if name not in FURTHER:
        return f" (default: {FROM_NOTHING[name]}, or that of --init)"
    lora = f"{ADAPTERS[name]}, at most {LR_TIMES_WIDTH} / width"
    return f" (default: {FROM_NOTHING[name]}; with --init: {FURTHER[name]}; with --lora: {lora})"


def step_range(text: str | None, steps: int | None) -> tuple[int, int] | None:
    """Return `--trace-steps` as (first, stop), None if not given. Raise UsageError for an invalid value."""
    if text is None:
        return None
    match, prefix = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text), f"--trace-steps {shown(text)}"
    if not match or not 1 <= int(match[1]) < int(match[2]):
        raise UsageError(f"{prefix}: expected FIRST:STOP with FIRST at least 1; 10:13 is steps 10, 11 and 12")
    if steps is not None and int(match[1]) > steps:
        raise UsageError(f"{prefix}: expected a step up to --steps {steps}")
    return int(match[1]), int(match[2])


def warmup_steps(warmup: Any, steps: int | None) -> int:
    """Return `--warmup` in steps; a percentage is kept if `steps` is None. Raise UsageError if invalid."""
    match = re.fullmatch(r"([0-9]{1,18})|([0-9]{1,3}(?:\.[0-9]{1,9})?)%", str(warmup))
    if not match or float(match[2] or 0) > 100:
        raise UsageError(f"--warmup {shown(warmup)}: expected steps such as 40, or a percentage such as 5%")
    if match[1]:
        return int(match[1])
    return warmup if steps is None else round(float(match[2]) / 100 * steps)


def flag(
    default: Any, kind: Any, group: str, text: str, *, fixed: bool = False, choices: Sequence[str] = ()
) -> Any:
    """Return a field of the configuration. `kind` is int, float, str, bool or list."""
    metadata = {"kind": kind, "group": group, "text": text, "fixed": fixed, "choices": tuple(choices)}
    if kind is list:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Config:
    """All settings of a run. None: the feature is off, or the value follows from other settings or the data.

    Until the data is read, `steps` may be None, `warmup` a percentage (`bounds.in_steps`). `default_names`:
    settings that no flag or file gives, and whose defaults may depend on the data or the resumed run.
    """

    removed = tuple[str, ...]()  # names of settings in the --config file that only 0.1.0 had

    # fmt: off
    out: str = flag("runs/default", str, "run", "folder for checkpoints, metrics and settings of the run")
    steps: int = flag(None, int, "run", "optimizer steps (default: 440; conversations with --init: 3 epochs)")
    epochs: int | None = flag(None, int, "run", "passes over the training data, instead of --steps")
    seed: int = flag(0, int, "run", "random seed for weight initialization and data order", fixed=True)
    resume: str = flag(
        "auto", str, "run", "checkpoint to resume from: auto (newest in OUT), never, or a folder")
    dry_run: bool = flag(False, bool, "run", "print what the run would do and need, then exit")
    sample: int = flag(400, int, "run", "length of the sample text at the end, in tokens; 0: none")
    prompt: str = flag(
        "def ", str, "run", "beginning of the sample text (held-out conversations: their first question)")

    arch: str | None = flag(None, str, "model", "model architecture", choices=tuple(ARCHITECTURES))
    layers: int | None = flag(None, int, "model", "number of transformer blocks")
    dim: int | None = flag(None, int, "model", "model width")
    heads: int | None = flag(None, int, "model", "number of attention heads")
    kv_heads: int | None = flag(
        None, int, "model", "number of key/value heads (default: as --heads)")
    ffn: int | None = flag(None, int, "model", "feed-forward width (default: depends on --arch)")
    experts: int | None = flag(None, int, "model", "experts in each feed-forward (default: no mixture)")
    experts_used: int | None = flag(None, int, "model", "number of experts per token (default: 2)")
    expert_ffn: int | None = flag(None, int, "model", "width of an expert (default: --ffn)")
    context: int = flag(None, int, "model", "tokens per training window", fixed=True)
    tied: bool | None = flag(
        None, bool, "model", "share weights of output head and embedding (default: only for --arch gpt2)")
    vocab_size: int | None = flag(
        None, int, "model", "vocabulary size, needed only for token files without a tokenizer")
    init: str | None = flag(None, str, "model", "model to start from: GGUF file or Hugging Face folder")
    add_tokens: str | None = flag(
        None, str, "model", "file of tokens, one per line or a JSON list, to add to the model of --init")
    freeze: list[str] = flag(
        None, list, "model", "name patterns of parameters that are not trained", fixed=True)

    lora: int | None = flag(
        None, int, "adapter", "rank of LoRA adapters to train on the frozen model of --init", fixed=True)
    lora_alpha: float | None = flag(None, float, "adapter",
        "LoRA scaling: the update is multiplied by alpha / rank (default: twice the rank)", fixed=True)
    lora_targets: list[str] = flag(None, list, "adapter",
        "name patterns of weights with adapters (default: blk.*.attn_*.weight blk.*.ffn_*.weight)",
        fixed=True)
    lora_init: str | None = flag(None, str, "adapter", "adapter.gguf to start from; it must have rank R")

    data: list[str] = flag(None, list, "data",
        "text, token files or conversations (.jsonl); PATH=SHARE sets mixing shares (default: Python's "
        "library)")
    tokenizer: str | None = flag(
        None, str, "data", "tokenizer: byte (default), from-init (default with --init), or a file")
    control_tokens: str | None = flag(None, str, "data",
        "special tokens such as <|im_start|> in text: parse as tokens, or plain characters (default: plain)",
        choices=READINGS)
    bos: str = flag(AUTO, str, "data",
        "BOS token before each window or conversation: always, never, or auto (if the model expects one)",
        fixed=True, choices=BOS)
    chat_template: str | None = flag(
        None, str, "data", "chat template: Jinja file, or name of a template of the tokenizer")
    template_var: list[str] = flag(
        None, list, "data", "variables of the chat template, NAME=VALUE; VALUE is JSON or text")
    enable_thinking: str | None = flag(
        None, str, "data", "value of the chat template's variable enable_thinking", choices=("true", "false"))
    system: str | None = flag(None, str, "data", "system message for conversations without one")
    template_date: str | None = flag(None, str, "data",
        "date of the chat template's strftime_now, e.g. 2024-07-26 (default: date of the first start)")
    loss_on: str | None = flag(None, str, "data",
        "tokens that count in the loss: answers (assistant replies) or all (default: answers)",
        choices=LOSSES)
    skip_bad: bool = flag(False, bool, "data", "skip conversations that cannot be read")
    packing: str | None = flag(None, str, "data",
        "how documents fill windows. documents: whole, without attention between them; none: cut at window "
        "borders (default: none; conversations: documents)", fixed=True, choices=PACKINGS)
    val_fraction: float = flag(
        0.05, float, "data", "fraction of the data held out for validation; 0: none", fixed=True)
    val_data: list[str] = flag(
        None, list, "data", "validation data, instead of --val-fraction; forms as for --data, without shares")

    batch_size: int = flag(None, int, "batch", "sequences per step, over all ranks", fixed=True)
    micro_batch: int = flag(2, int, "batch", "sequences per forward pass", fixed=True)

    lr: float = flag(None, float, "optimizer", "peak learning rate")
    min_lr: float | None = flag(None, float, "optimizer", "final learning rate (default: lr / 10)")
    warmup: int = flag(None, str, "optimizer", "linear warmup, in steps or percent of all steps")
    schedule: str = flag("cosine", str, "optimizer",
        "learning-rate decay; wsd: linear, in the last steps only",
        choices=("cosine", "linear", "constant", "wsd"))
    decay_steps: int | None = flag(
        None, int, "optimizer", "steps of the decay of --schedule wsd (default: 10% of all)")
    lr_scale: list[str] = flag(
        None, list, "optimizer", "learning-rate factor X for parameters matching W; the last match wins")
    optimizer: str = flag("adamw", str, "optimizer",
        "update rule: adamw, or muon for the matrices in blocks and adamw for all other parameters",
        choices=("adamw", "muon"), fixed=True)
    qat: str | None = flag(None, str, "optimizer",
        "train for export --type NAME: round weights to its types after each step, keep float32 masters",
        choices=tuple(QAT_TYPES), fixed=True)
    weight_decay: float = flag(0.1, float, "optimizer", "weight decay of matrices")
    beta1: float = flag(0.9, float, "optimizer", "decay rate of the first moment")
    beta2: float = flag(0.95, float, "optimizer", "decay rate of the second moment")
    eps: float = flag(1e-8, float, "optimizer", "AdamW epsilon, added to the root of the second moment")
    ema: float | None = flag(None, float, "optimizer",
        "decay of an exponential moving average of the weights, saved as a second model (e.g. 0.999)",
        fixed=True)
    grad_clip: float = flag(1.0, float, "optimizer", "maximum norm of the gradient; 0: no limit")
    balance_loss: float | None = flag(None, float, "optimizer",
        "weight of the loss that balances experts (router_aux_loss_coef; default: 0.001; with --lora: 0)")
    z_loss: float | None = flag(None, float, "optimizer",
        "weight of the squared log-sum-exp of router logits, e.g. 0.001 (default: 0)")

    loss: str = flag(CROSS_ENTROPY, str, "loss",
        "loss function; all except cross-entropy need chosen and rejected answers in --data",
        choices=(CROSS_ENTROPY, *PREFERENCES), fixed=True)
    preference_beta: float = flag(
        0.1, float, "loss", "beta of the preference loss (tau of ipo)", fixed=True)
    label_smoothing: float = flag(
        0.0, float, "loss", "assumed fraction of wrong labels in dpo, below 0.5", fixed=True)
    simpo_gamma: float = flag(0.5, float, "loss", "target margin of simpo", fixed=True)
    desirable_weight: float = flag(1.0, float, "loss", "weight of chosen answers in kto", fixed=True)
    undesirable_weight: float = flag(1.0, float, "loss", "weight of rejected answers in kto", fixed=True)
    teacher: str | None = flag(None, str, "loss", "file of predictions to learn from (evaluate --top-k-out)")
    teacher_weight: float = flag(
        0.5, float, "loss", "weight W of the teacher in the loss, 0 to 1; cross-entropy: 1 - W", fixed=True)

    strategy: str = flag("full-shard", str, "sharding",
        "sharding strategy; hybrid-shard: full-shard inside each node",
        choices=("full-shard", "shard-grad-op", "no-shard", "hybrid-shard"))
    bucket_mb: float = flag(25.0, float, "sharding", "bucket size of --strategy no-shard, in MiB")
    prefetch: int | None = flag(None, int, "sharding",
        "stages whose parameters are gathered ahead (default: 1; 2 with --device cuda)")
    recompute: bool = flag(False, bool, "sharding", "recompute activations in backward, to save memory")
    reduction: str = flag("exact", str, "sharding",
        "summation of gradients. exact: same bits on any number of ranks; fast: order of the MPI library",
        choices=("exact", "fast"))
    transport: str = flag("auto", str, "sharding",
        "messages between ranks: auto, mpi or shared (memory of a node); on GPUs: auto, mpi (CUDA-aware), "
        "staged (through the host) or nccl", choices=CHOICES)
    device: str = flag(
        "auto", str, "machine", "device of arrays and computation", choices=("auto", "cpu", "cuda"))
    precision: str = flag("fp32", str, "machine",
        "dtype of parameters, activations and matmuls", choices=("fp32", "bf16", "fp16", "fp64"))
    reduce_dtype: str | None = flag(
        None, str, "machine", "dtype in which gradients are sent (default: as --precision)")
    offload: str = flag("none", str, "machine",
        "GPU data kept in host memory: moments, or state (also the fp32 weights of bf16 training)",
        choices=("none", "moments", "state"))
    bits: str = flag(None, str, "machine",
        "kernels. native: fastest on this CPU; portable: same results on every AVX2 CPU (default: "
        "ZERO_MPI_BITS, else native)", fixed=True, choices=portable.CHOICES)
    threads: str | None = flag(None, str, "machine", "CPU threads per rank; auto: all its cores (default: 1)")

    save_every: int | None = flag(
        None, int, "records", "steps between checkpoints; 0: only at the end (default: every 10 minutes)")
    keep: int = flag(3, int, "records", "number of checkpoints to keep; 0: all")
    async_save: bool = flag(False, bool, "records", "write checkpoints in the background, during training")
    checkpoint_io: str = flag("gather", str, "records",
        "ranks that write a checkpoint. gather: rank 0; parallel: several", choices=("gather", "parallel"))
    writers_per_node: int | None = flag(
        None, int, "records", "ranks per node that write, with --checkpoint-io parallel")
    eval_every: int = flag(110, int, "records", "steps between evaluations; 0: only at the end")
    patience: int | None = flag(None, int, "records",
        "early stopping after N evaluations without improvement; OUT/best is the best checkpoint")
    eval_windows: int = flag(128, int, "records", "validation windows per evaluation")
    log_every: int = flag(20, int, "records", "steps between log lines, if no progress bar is shown")
    log_level: str = flag("info", str, "records",
        "lowest level of messages to print", choices=("debug", "info", "warning", "error"))
    tensorboard: bool = flag(False, bool, "records", "write TensorBoard event files to OUT/tensorboard")
    prometheus: str | None = flag(
        None, str, "records", "folder for a metrics file for node_exporter's textfile collector")
    wandb: str | None = flag(None, str, "records", "Weights & Biases project for the metrics")
    mlflow: str | None = flag(
        None, str, "records", "MLflow experiment for the metrics (server: MLFLOW_TRACKING_URI)")
    trace: str | None = flag(None, str, "records", "write a timeline of all ranks to FILE, .json or .json.gz")
    trace_steps: str | None = flag(
        None, str, "records", "steps in the timeline: 10:13 is 10 to 12 (default: three steps)")
    timeout: float = flag(
        600.0, float, "records", "seconds without progress after which the job is ended; 0: never")
    check_collectives: bool = flag(
        False, bool, "records", "check that ranks start the same collectives; slow")
    max_time: str | None = flag(
        None, str, "records", "time limit, e.g. 3h50m: then save and stop with status 75")
    # fmt: on

    def __post_init__(self) -> None:
        self.bits = self.bits or portable.requested()
        self.default_names = {name for name in ("lr", *LENGTH, *ANY) if getattr(self, name) is None}
        if self.init is None or not self.default_names >= LENGTH:
            self.default_names -= LENGTH
        steps = STEPS if self.init is None and self.epochs is None else {}
        defaults = FROM_NOTHING if self.init is None else FURTHER if self.lora is None else ADAPTERS
        for name, value in (ANY | defaults | steps).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if "lr" in self.default_names:
            self.lr *= self.rate_factor
        self.warmup = warmup_steps(self.warmup, self.steps)

    @property
    def rate_factor(self) -> float:
        """Factor on the default learning rate; preference losses need a lower rate than other fine-tuning."""
        return 1.0 if self.loss == CROSS_ENTROPY else 0.1

    @property
    def adapters(self) -> LoRA | None:
        if self.lora is None:
            return None
        alpha = 2.0 * self.lora if self.lora_alpha is None else self.lora_alpha
        return LoRA(self.lora, alpha, tuple(self.lora_targets or TARGETS))

    @property
    def frozen(self) -> tuple[str, ...]:
        return (*(self.freeze or ()), *(FROZEN if self.lora is not None else ()))

    @property
    def preference(self) -> Preference | None:
        if self.loss == CROSS_ENTROPY:
            return None
        names = ("label_smoothing", "simpo_gamma", "desirable_weight", "undesirable_weight")
        return Preference(self.loss, self.preference_beta, *(getattr(self, name) for name in names))

    @property
    def base_is_reference(self) -> bool:
        """True if the model without its adapters equals the model at the start of the run."""
        return self.lora is not None and self.lora_init is None and self.add_tokens is None

    def stages_ahead(self, on_gpu: bool) -> int:
        """Return how many stages ahead parameters are gathered; more on a GPU, whose host runs ahead."""
        return 1 + on_gpu if self.prefetch is None else self.prefetch

    @property
    def holds_out(self) -> bool:
        return self.val_fraction > 0 or bool(self.val_data)

    def fixed(self) -> dict[str, Any]:
        """Return the settings that a resumed run must keep, apart from the sizes of the model."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["fixed"]}

    def plan(self) -> dict[str, Any]:
        """Return the settings that a resumed run may change, although this changes the result."""
        names = [f.name for f in dataclasses.fields(self) if f.metadata["group"] == "optimizer"]
        return {name: value for name in ("steps", *names) if (value := getattr(self, name)) != []}


FIELDS = {field.name: field for field in dataclasses.fields(Config)}
ALIASES = {"learning_rate": "lr"}  # second names of settings, for flags and files


def spelled(name: str) -> str:
    return "--" + name.replace("_", "-")
