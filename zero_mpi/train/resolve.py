"""Resolves a run: checks its flags, the files that the flags name, and the machine.

Only caches are written, and only the text needs much memory. `setup.build` builds a run from the result, and
`--dry-run` describes it. Only rank 0 lists checkpoints and reads text. An error is raised on all ranks.
"""

import platform
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi import data, device, environment, ops
from zero_mpi.checkpoint.huggingface.folder import HuggingFaceFolder
from zero_mpi.checkpoint.sound import ID
from zero_mpi.checkpoint.state import Description
from zero_mpi.checkpoint.weights import WeightSource, keys_of, open_adapter, tokens_of, weights_digest
from zero_mpi.comm import kinds
from zero_mpi.comm.agree import Facts
from zero_mpi.config import bounds, inputs
from zero_mpi.config.settings import BYTE, EPOCHS, LR_TIMES_WIDTH, MOST_CONTEXT, Config, batch_size
from zero_mpi.data import Corpus, EvalLoader, HeldOut, SampleOrder, StepLoader, Tokenizer, WindowSource
from zero_mpi.data.conversations.tokenized import ANSWERS
from zero_mpi.data.corpus import Part, load_corpus
from zero_mpi.data.document_reader import DocumentReader
from zero_mpi.data.documents import Remark, Stream
from zero_mpi.data.encoded_cache import Batches, Beat
from zero_mpi.data.packing import DOCUMENTS, NONE
from zero_mpi.data.tokenizers.byte import bos_of
from zero_mpi.environment.portable import PORTABLE
from zero_mpi.errors import UsageError
from zero_mpi.launch.consistency import SAME_FILES, SAME_FLAGS, check, check_pins, same, short_digest
from zero_mpi.launch.stopping import signals
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.plan import rank_memory
from zero_mpi.sharding.precision import precision_named
from zero_mpi.telemetry import log, trackers
from zero_mpi.train import description, resume
from zero_mpi.train.objective import check_teacher


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Specification of a run. It is equal on all ranks, except that only rank 0 has the text."""

    config: Config  # the flags, with the sizes of the model in `--init`
    threads: int  # number of threads of this rank
    init: WeightSource | None  # source of the initial weights; None: they are random
    tokenizer: Tokenizer | None  # tokenizer of the text; None: --data has token files
    model: ModelConfig
    checkpoint: resume.ResumePoint | None  # checkpoint to resume from
    description: Description  # facts that the run's checkpoints store
    adapter: WeightSource | None = None  # source of the initial adapter weights
    default_names: frozenset[str] = frozenset()  # names of settings that no flag or file gives
    corpus: Corpus | None = None
    loader: StepLoader | None = None  # only on rank 0, like the corpus
    notes: tuple[str, ...] = ()  # lines that rank 0 prints at the start
    memory_problem: str = ""  # on rank 0: why memory does not suffice; shown last by a dry run

    @property
    def resumed(self) -> Path | None:
        return None if self.checkpoint is None else self.checkpoint.folder

    @property
    def weights(self) -> dict[str, WeightSource | None]:
        return {"init": self.init, "lora_init": self.adapter}

    @property
    def out(self) -> Path:
        return Path(self.config.out)


def resolve(world: World, config: Config, *, cached: bool = True, begun: str | None = None) -> RunSpec:
    """Return the specification of a run. All ranks raise UsageError if `config` is unusable. Collective.

    If `cached` is false, text is encoded again even if its ids are cached. `begun`: fingerprint of the
    tokenizer with which the run began, used if no checkpoint stores it.

    The ranks first agree on everything that each rank reads itself. Each later agreement needs an earlier
    result: ranks with different flags would diverge, all ranks read a checkpoint together, only rank 0 reads
    the large text, and one rank of a node compiles the operations for all ranks of the node.
    """
    notes = list[str]()
    check(world.comm, description.settings(config), SAME_FLAGS)
    checkpoint = resume.find_checkpoint(world, config, Path(config.out), notes)
    number = world.node.rank
    if checkpoint is not None:
        begun = checkpoint.settings.get("data.tokenizer")
    read = partial(read_inputs, config, checkpoint, number, begun)
    spec: RunSpec = same(world.comm, lambda: signals.cut_short(read), SAME_FILES)
    spec = replace(spec, config=inputs.settled(spec.config, spec.model))  # the ranks have agreed on the model
    notes += spec.notes
    spec = read_text(world, spec, cached)
    if spec.corpus is not None and spec.loader is not None:
        notes += map(log.Caution, bounds.cautions(spec.config, max(spec.loader.epochs(spec.config.steps))))
        data_notes = [*spec.corpus.notes, *spec.loader.windows.notes()]
        notes += (note if isinstance(note, Remark) else log.Caution(note) for note in data_notes)
    notes += map(log.Caution, inputs.ignored_parts(spec.init))
    if checkpoint is not None or not config.dry_run:  # a dry run without a checkpoint compares no bits
        machine = try_operations(world, spec.config, spec.threads, notes)
        facts = replace(spec.description, machine={**machine, **spec.description.machine})
        spec = replace(spec, description=facts)
    if checkpoint is not None:
        notes += resume.changes_since(checkpoint, spec.description)
        notes += resume.jumps_of_rate(checkpoint, spec.config)
    return replace(spec, notes=tuple(notes))


def read_inputs(
    config: Config, checkpoint: resume.ResumePoint | None, number: int, begun: str | None
) -> tuple[RunSpec, Facts]:
    """Return this rank's inputs, and facts that must be equal on all ranks. Raise UsageError for bad input.

    `number`: this rank's index on its node, used if the launcher does not give it. `begun`: see `resolve`.
    """
    config = resume.original_config(config, checkpoint)
    default_names = frozenset(config.default_names)
    device.use(config.device, number)
    device_name = device.in_use().name
    kinds.check_flag(config.transport, device_name == "cuda")
    threads = set_threads(config)
    init = inputs.open_init(config)
    base = None if init is None else inputs.read_model(init)
    tokenizer = resume.original_tokenizer(inputs.choose_tokenizer(config, init, base), begun)
    model = inputs.adapted(config, base or inputs.model_from_flags(config, tokenizer), init, device_name)
    config = inputs.shortened(config, model)
    inputs.check_model(config, model)
    adapter = None if config.lora_init is None else open_adapter(config.lora_init, model, tokens_of(init))
    checkpoint_id = None if checkpoint is None else keys_of(checkpoint.files.state).text(ID)
    facts = description.input_facts(config, checkpoint_id, init, model, tokenizer)
    facts |= {f"the adapter of --lora-init {config.lora_init}": adapter and weights_digest(adapter)}
    kind = bounds.DataKind(tokenizer is not None, data.holds_token_files(config.data))
    remarks = [*bounds.remarks(config, kind), *inputs.kept_as_floats(init, model, device_name)]
    day = resume.settled_day(config, tokenizer, checkpoint)
    config = replace(config, bos=resume.settled_bos(config, tokenizer, checkpoint), template_date=day)
    spec = RunSpec(
        config=config,
        threads=threads,
        init=init,
        tokenizer=tokenizer,
        model=model,
        checkpoint=checkpoint,
        description=description.describe(config, model, tokenizer, init),
        adapter=adapter,
        default_names=default_names,
        notes=tuple(remarks),
    )
    return spec, {name: short_digest(value) for name, value in facts.items()}


def read_text(world: World, spec: RunSpec, cached: bool) -> RunSpec:
    """Return the run with the text on rank 0, and with the facts of the text on all ranks. Collective.

    The run's memory is checked before the text is read, and again with the settings that the text decides.
    """
    nodes, specs = rank_memory.nodes_of(world), list[RunSpec]()

    def memory_problem(config: Config) -> str:
        problem = rank_memory.find_problem(nodes, config, spec.model, world.size)
        if problem and not config.dry_run:
            raise UsageError(problem)
        return problem

    def read(beat: Beat) -> tuple[Config, str, str, dict[str, object]]:
        trackers.check(spec.config)
        problem = memory_problem(spec.config)
        corpus = read_corpus(spec.config, spec.model, spec.tokenizer, Batches(beat, cached))
        packing = " ".join(packing_of(spec.config, part.stream) for part in corpus.parts)
        config, loader, held_out = fitted(spec, corpus)
        if config.teacher is not None:
            check_teacher(config.teacher, corpus, spec.model, spec.tokenizer)
        problem = problem or memory_problem(config)
        if config.patience is not None and not held_out:
            raise UsageError(f"--patience {config.patience}: there is too little data for a validation set")
        keys = {}
        if spec.tokenizer is None and isinstance(spec.init, HuggingFaceFolder):  # for token files
            keys = inputs.carried_keys(spec.init, spec.model)
        if spec.checkpoint is not None:
            resume.check_resume(
                spec.checkpoint, description.of_text(spec.description, config, corpus.sha256, packing, keys)
            )
        specs.append(replace(spec, corpus=corpus, loader=loader, memory_problem=problem))
        return config, corpus.sha256, packing, keys

    config, *text_facts = world.run_on_root_with_beat(read)
    facts = description.of_text(spec.description, config, *text_facts)
    return replace(specs[0] if specs else spec, config=config, description=facts)


def fitted(spec: RunSpec, corpus: Corpus) -> tuple[Config, StepLoader, HeldOut]:
    """Return the flags with defaults for this data, and the loaders. Raise UsageError for too little data."""

    def with_defaults(config: Config, **settings: Any) -> Config:
        return replace(config, **{name: settings[name] for name in settings if name in spec.default_names})

    config, model = spec.config, spec.model
    streams = [part.stream for part in (*corpus.parts, *corpus.held_out)]
    if config.lora is not None:
        limit = LR_TIMES_WIDTH / model.embedding_length * config.rate_factor
        config = with_defaults(config, lr=min(config.lr, limit))
    if config.init is not None and all(stream.counted is not None for stream in streams):
        step = 1 if config.preference is None else 2  # both answers of a pair are in one window
        sizes = [np.maximum(np.diff(stream.ends, prepend=0) - 1, 0).reshape(-1, step) for stream in streams]
        longest = max(int(each.sum(1).max(initial=1)) for each in sizes)
        context = min(longest, model.context_length, step * MOST_CONTEXT)
        config = with_defaults(config, context=context, epochs=EPOCHS)
        config = with_defaults(config, batch_size=batch_size(make_loaders(config, corpus)[0].order.epoch))
    loader, held_out = make_loaders(config, corpus)
    config = bounds.in_steps(config, loader.order.epoch)
    bounds.check(config)
    return config, loader, held_out


def packing_of(config: Config, stream: Stream) -> str:
    return config.packing or (NONE if stream.counted is None else DOCUMENTS)


def set_threads(config: Config) -> int:
    """Set the number of threads of this rank and return it; --threads 0: one for each core of the rank."""
    threads = bounds.threads_within(bounds.thread_count(config.threads))
    return ops.use_threads(environment.cores_per_rank() if threads == 0 else threads)


def read_corpus(config: Config, model: ModelConfig, tokenizer: Tokenizer | None, batches: Batches) -> Corpus:
    """Return the training and validation data that the flags name."""
    reader = DocumentReader(
        tokenizer,
        model.vocab_size,
        any_bytes=config.tokenizer == BYTE,
        skip_bad=config.skip_bad,
        control_tokens=config.control_tokens,
        bos=bos_of(tokenizer, config.bos),
        loss_on=config.loss_on or ANSWERS,
        inputs=inputs.template_inputs(config, tokenizer),
        packs=config.packing == DOCUMENTS,
        batches=batches,
        preferences="" if config.preference is None else config.loss,
    )
    return load_corpus(config.data, reader, config.val_fraction, config.context, config.seed, config.val_data)


def make_loaders(config: Config, corpus: Corpus) -> tuple[StepLoader, HeldOut]:
    """Return the loaders of micro-batches for steps and evaluations. Raise UsageError for too little data."""
    parts = [windows_of(config, part) for part in corpus.parts]
    order = SampleOrder([len(each) for each in parts], [part.share for part in corpus.parts], config.seed)
    steps = StepLoader(
        parts[0] if len(parts) == 1 else data.MixedWindows(parts),
        batch_size=config.batch_size,
        micro_batch=config.micro_batch,
        seed=config.seed,
        order=order,
    )
    loaders = {
        part.name: EvalLoader(windows_of(config, part), config.micro_batch, config.eval_windows)
        for part in corpus.held_out
    }
    return steps, HeldOut(loaders)


def windows_of(config: Config, part: Part) -> WindowSource:
    """Return the windows of a source. Raise UsageError if a named source is empty or used for preferences."""
    paired = config.preference is not None
    if part.name and paired:
        raise UsageError(f"--loss {config.loss}: expected --data without shares, found {part.name}")
    source = data.windows_over(part.stream, config.context, packing_of(config, part.stream), part.bos, paired)
    if part.name and not len(source):
        raise UsageError(f"--data: {part.name} holds no {source.kind}")
    return source


def try_operations(world: World, config: Config, threads: int, notes: list[str]) -> dict[str, Any]:
    """Compile or load the operations and check that they compute the same bits on all ranks. Collective.

    Returns rank 0's machine facts on all ranks; other ranks' facts may differ if bits are equal. Raises
    UsageError on all ranks if bits differ in exact mode.
    """
    kind = precision_named(config.precision).compute
    if config.bits == PORTABLE:
        world.run_on_all(check_pins)
    world.node_by_node(lambda: ops.prepare(partial(log.info, "%s") if world.rank == 0 else None, kind))
    machines = world.results(lambda: (platform.node(), description.machine_facts(threads, kind)))
    description.check_bits(machines, config.reduction == "exact", notes)
    reason = ops.slower(kind)
    if reason:
        notes.append(log.Caution(f"--precision {config.precision} is {reason}"))
    return dict(machines[0][1])
