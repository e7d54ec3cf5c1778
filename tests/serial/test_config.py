"""Flags and a TOML file with the same names give the same settings."""

import os

import pytest

from zero_mpi.config.bounds import seconds, thread_count
from zero_mpi.config.command_line import parse
from zero_mpi.config.settings import FIELDS, Config, spelled
from zero_mpi.config.toml import recorded, write_toml
from zero_mpi.errors import UsageError

ODD = {int: 7, float: 0.25, str: "a text", bool: True, list: ["one", "two words"]}
# Settings that accept only some values of their type.
SPECIAL = {"threads": "2", "max_time": "1h30m", "reduce_dtype": "fp32", "resume": "never", "schedule": "wsd"}
SPECIAL |= {"decay_steps": 3, "steps": 20, "strategy": "no-shard"}
SPECIAL |= {"arch": "gpt2", "reduction": "fast", "tokenizer": "from-init", "trace_steps": "2:5"}
SPECIAL |= {"transport": "mpi", "device": "cpu", "min_lr": 0.001, "lr_scale": ["*.bias=0", "blk.*=1.5"]}
SPECIAL |= {"label_smoothing": 0.25, "trace": "t.json", "warmup": 7}
# Settings that require another setting.
NEEDS = {"trace_steps": ["trace"], "decay_steps": ["schedule"], "lora": ["init"]}
NEEDS |= {name: ["init", "lora"] for name in ("lora_alpha", "lora_targets", "lora_init")}
NEEDS |= {"loss": ["data"], "add_tokens": ["init"]}


def other_value(name):
    field = FIELDS[name]
    if name in SPECIAL:
        return SPECIAL[name]
    return field.metadata["choices"][-1] if field.metadata["choices"] else ODD[field.metadata["kind"]]


def as_flags(name, value):
    if isinstance(value, bool):
        return [spelled(name) if value else spelled(name).replace("--", "--no-", 1)]
    return [spelled(name), *map(str, value if isinstance(value, list) else [value])]


def from_file(tmp_path, text, *flags):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return parse(["--config", str(path), *flags])


@pytest.mark.parametrize("name", [n for n, field in FIELDS.items() if field.metadata["kind"] is bool])
def test_switches_can_be_turned_off(name, tmp_path):
    assert getattr(parse([spelled(name), *as_flags(name, False)]), name) is False
    assert getattr(from_file(tmp_path, f"{name} = true\n", *as_flags(name, False)), name) is False


def test_a_flag_cannot_be_shortened():
    """Abbreviations are errors, because a new flag could make them ambiguous."""
    with pytest.raises(UsageError, match="--val"):
        parse(["--val", "0.1"])


@pytest.mark.parametrize(
    "flags",
    [
        *(["--batch-size", "0"], ["--micro-batch", "0"], ["--context", "0"], ["--seed", "-1"]),
        *(["--val-fraction", "1"], ["--val-fraction", "-0.1"], ["--beta1", "1"], ["--beta2", "-1"]),
        *(["--lr", "-1"], ["--lr", "nan"], ["--steps", "-1"], ["--log-every", "0"], ["--keep", "-1"]),
        *(["--bucket-mb", "0"], ["--bucket-mb", "nan"], ["--bucket-mb", "inf"], ["--prefetch", "-1"]),
        *(["--lr", "inf"], ["--timeout", "nan"], ["--lr-scale", "*"], ["--lr-scale", "=2"]),
        *(["--lr-scale", "*=-1"], ["--lr-scale", "*=nan"], ["--lr-scale", "a=1", "b=x"]),
        *(["--warmup=-1"], ["--warmup", "5 %"], ["--warmup", "101%"], ["--warmup", "1e3"]),
        *(["--ema", "0"], ["--ema", "1"], ["--ema", "nan"]),
    ],
    ids=" ".join,
)
def test_values_out_of_range_are_refused_by_name(flags):
    with pytest.raises(UsageError, match=flags[0].partition("=")[0]):
        parse(flags)


TEXTS = (["a b", 'quo"te', "back\\slash", "ünï", "tab\there"], [], ["new\nline"])
# Values of settings that would otherwise contradict the unusual values of other settings.
BESIDE = {"offload": "none", "reduction": "exact", "precision": "fp32", "optimizer": "adamw", "qat": None}
BESIDE |= {"teacher": None}
GOING_ROUND = [
    {name: other_value(name) for name in FIELDS if name != "epochs"} | BESIDE,
    {},
    {"optimizer": "muon"},
    {"qat": "q4_k"},
    {"keep": 0, "sample": 0, "grad_clip": 0.0, "val_fraction": 0.0, "tied": False, "warmup": 0},
    *({"data": text, "freeze": text} for text in TEXTS),
    *({"lr": value} for value in (0.1 + 0.2, 1e-300, 1e22, 5e-324)),
]


@pytest.mark.parametrize("values", GOING_ROUND)
def test_settings_go_through_the_file_and_back(values, tmp_path):
    """TOML has no None, so settings that are None are left out; 0, 0.0 and false are written."""
    config = Config(**values)
    assert from_file(tmp_path, write_toml(config)) == config


@pytest.mark.parametrize("name", FIELDS)
def test_a_flag_sets_its_setting_and_wins_over_the_file(name, tmp_path):
    """A flag overrides the file even if its value is the default."""
    value = other_value(name)
    others = {key: other_value(key) for key in NEEDS.get(name, [])}
    flags = [flag for key in (name, *others) for flag in as_flags(key, other_value(key))]
    assert getattr(parse(flags), name) == value
    text = write_toml(Config(**{name: value}, **others))
    assert getattr(from_file(tmp_path, text), name) == value
    default = getattr(Config(), name)
    if default not in (None, []):
        assert getattr(from_file(tmp_path, text, *as_flags(name, default)), name) == default


def test_names_are_spelled_with_dashes_or_underscores_and_whole_numbers_are_floats(tmp_path):
    config = from_file(tmp_path, "batch-size = 5\nmicro_batch = 3\nlr = 1\n")
    assert (config.batch_size, config.micro_batch, config.lr, type(config.lr)) == (5, 3, 1.0, float)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stepz = 3\n", "'stepz'"),
        ('steps = "3"\n', "steps = '3', expected int"),
        ("steps = 3.5\n", r"steps = 3\.5, expected int"),
        ("steps = true\n", "steps = True, expected int"),
        ("lr = false\n", "lr = False, expected float"),
        ("tied = 1\n", "tied = 1, expected bool"),
        ('data = "a"\n', "data = 'a', expected list"),
        ("data = [1]\n", r"data = \[1\], expected"),
        ("[run]\nsteps = 3\n", "'run'"),
        ("steps = \n", "TOML"),
        ("batch_size = 0\n", "--batch-size 0: "),
    ],
)
def test_a_wrong_file_is_refused_with_file_and_key(text, expected, tmp_path):
    with pytest.raises(UsageError, match=expected):
        from_file(tmp_path, text)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name in ("nowhere.toml", "binary.toml", ""):
        with pytest.raises(UsageError, match=f"--config {tmp_path / name}: "):
            parse(["--config", str(tmp_path / name)])


DURATIONS = {"3h50m": 13800, "90s": 90, "15m": 900, "3600": 3600, "1h2m3s": 3723, "0.5h": 1800, "1h30m": 5400}
DURATIONS |= {"0": 0, "1.5": 1.5, None: None}


def test_durations():
    assert {text: seconds(text) for text in DURATIONS} == DURATIONS
    for text in ("soon", "", "1h30", "h", "3d", "-5", "1 h", "1e3", "3hh", ".", "1.2.3s", "²"):
        with pytest.raises(UsageError, match="--max-time"):
            seconds(text)


def test_threads():
    assert [thread_count(text) for text in (None, "auto", "1", "12")] == [None, 0, 1, 12]
    for text in ("zero", "0", "-1", "1.5", "", "²"):
        with pytest.raises(UsageError, match="--threads"):
            thread_count(text)


def test_every_path_is_recorded_from_the_root():
    settings = {"init": "base.gguf", "lora_init": "adapter.gguf", "data": ["text"], "trace": "run.json"}
    config = recorded(Config(**settings, lora=2))
    paths = ["base.gguf", "adapter.gguf", "text", "run.json"]
    assert [config.init, config.lora_init, *config.data, config.trace] == [*map(os.path.abspath, paths)]
