"""Tests of flags that contradict each other or have no effect, and of notes at the start."""

import re

import pytest

from zero_mpi import environment
from zero_mpi.config.bounds import DataKind, remarks, threads_within, without_effect
from zero_mpi.config.command_line import parse
from zero_mpi.config.toml import write_toml
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError

REFUSED = {  # refused flags: (flag in the message, remedy)
    "--lora-alpha 2": ("--lora RANK", "--init m.gguf --lora 1"),
    "--lora-targets a b": ("--lora RANK", "--init m.gguf --lora 1"),
    "--lora-init a.gguf": ("--lora RANK", "--init m.gguf --lora 1"),
    "--add-tokens t": ("--init MODEL", "--init m.gguf"),
    "--ema 0.9 --offload moments": ("--offload moments", "--offload none"),
    "--optimizer muon --lora 2 --init m.gguf": ("--lora", "--optimizer adamw"),
    "--optimizer muon --offload moments --device cuda": ("--offload moments", "--offload none"),
    "--precision fp64 --offload moments": ("--offload", "--offload none"),
    "--qat q4_0 --lora 2 --init m.gguf --precision bf16": ("--lora", None),
    "--qat q4_0 --add-tokens t --lora 1 --init m.gguf": ("--add-tokens", None),
    "--qat q4_0 --freeze blk.0.*": ("--freeze", None),
    "--qat q4_0 --optimizer muon": ("--optimizer muon", "--optimizer adamw"),
    "--qat q4_0 --ema 0.9": ("--ema", None),
    "--qat q4_0 --device cuda": ("--device cuda", "--device cpu"),
    "--epochs 2 --steps 5": ("--steps 5", None),
    "--trace-steps 2:5": ("--trace FILE", "--trace t.json"),
    "--min-lr 0.1 --lr 0.01": ("--lr 0.01", "--lr 0.2"),
    "--decay-steps 5": ("--schedule wsd", "--schedule wsd"),
    "--decay-steps 5 --schedule wsd --warmup 4 --steps 8": ("--steps 8 .*--warmup 4", "--steps 9"),
    "--bits native": ("ZERO_MPI_BITS", "--bits portable"),
    "--bits portable --precision bf16": ("--precision bf16", "--precision fp32"),
    "--bits portable --reduction fast": ("--reduction fast", "--reduction exact"),
    "--bits portable --device cuda": ("GPU", "--device cpu"),
    "--loss dpo": ("--data FILE.jsonl", "--data p.jsonl"),
    "--teacher t --loss dpo --data p.jsonl": ("--loss dpo", "--loss cross-entropy"),
    "--teacher t --bits portable": ("--bits portable", "--bits native"),
    "--patience 2 --val-fraction 0": ("--val-fraction 0", "--val-fraction 0.1"),
    "--patience 2 --eval-every 0": ("--eval-every 0", "--eval-every 1"),
}
IDLE_CASES = {  # flags without effect: (flag in the message, flags with which it has an effect)
    "--min-lr 0 --schedule constant": ("--schedule constant", "--schedule linear"),
    "--eval-every 5 --val-fraction 0": ("--val-fraction 0", "--val-fraction 0.1"),
    "--preference-beta 0.2": ("--loss cross-entropy", "--loss kto --data p.jsonl"),
    "--label-smoothing 0.1 --loss ipo --data p.jsonl": ("--loss ipo", "--loss dpo"),
    "--simpo-gamma 0.1 --loss dpo --data p.jsonl": ("--loss dpo", "--loss simpo"),
    "--desirable-weight 2": ("", "--loss kto --data p.jsonl"),
    "--undesirable-weight 2": ("", "--loss kto --data p.jsonl"),
    "--teacher-weight 0.2": ("--teacher", "--teacher t"),
    "--loss-on all --loss dpo --data p.jsonl": ("--loss dpo", "--loss cross-entropy"),
}
IDLE_WITH_TOKENS = ("--tokenizer byte", "--control-tokens parse", "--bos always")


def said(*flags, is_text=True):
    return list(without_effect(parse(" ".join(flags).split()), DataKind(is_text)))


@pytest.mark.parametrize("flags", REFUSED)
def test_what_would_never_happen_is_refused(flags, monkeypatch):
    others, remedy = REFUSED[flags]
    monkeypatch.setattr(portable, "active", flags == "--bits native")  # simulates a restarted process
    with pytest.raises(UsageError, match=f"^{flags.split()[0]} .*{others}"):
        parse(flags.split())
    parse([*flags.split(), *remedy.split()] if remedy else flags.split()[:2])


@pytest.mark.parametrize("flags", IDLE_CASES)
def test_what_does_nothing_is_said_in_a_line(flags):
    others, remedy = IDLE_CASES[flags]
    (line,) = said(flags)
    assert re.match(f"{flags.split()[0]} .* has no effect.*{others}", line)
    assert said(flags, remedy) == []


@pytest.mark.parametrize("flags", IDLE_WITH_TOKENS)
def test_what_is_for_text_does_nothing_for_tokens(flags):
    (line,) = said(flags, is_text=False)
    assert line.startswith(f"{flags} has no effect: ")
    assert "--data" in line
    assert said(flags) == []


def test_beside_a_tokenizer_token_files_make_text_and_spell_nothing():
    arguments = [flag for flags in IDLE_WITH_TOKENS for flag in flags.split()]
    cautions = [*without_effect(parse(arguments), DataKind(is_text=True, are_ids=True))]
    assert [line.partition(" has ")[0] for line in cautions] == ["--bos always", "--control-tokens parse"]


@pytest.mark.parametrize("flags", ["", "--val-fraction 0", "--strategy no-shard", "--sample 0"])
def test_defaults_are_no_flags_that_were_given(flags, tmp_path):
    """Settings in a file that equal the defaults do not count as given flags either."""
    (tmp_path / "all.toml").write_text(write_toml(parse(flags.split())))
    assert said("--config", str(tmp_path / "all.toml")) == said(flags) == []


def test_a_model_that_is_trained_further_has_another_rate_and_it_is_said():
    config = parse(["--init", "m.gguf", "--data", "text"])
    assert config.lr == 5e-5
    assert [line[:13] for line in remarks(config, DataKind(True))] == ["--lr 5e-05: t"]
    assert parse(["--init", "m.gguf", "--lr", "0.01"]).lr == 0.01
    assert list(remarks(parse(["--init", "m.gguf", "--data", "text", "--lr", "0.01"]), DataKind(True))) == []
    assert parse([]).lr == 4e-3
    _, line = remarks(parse(["--init", "m.gguf"]), DataKind(True))
    assert line.startswith("--init without --data")


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(environment, "cores", lambda: 4)
    assert [threads_within(count) for count in (None, 0, 1, 4)] == [None, 0, 1, 4]
    with pytest.raises(UsageError, match=r"^--threads 5: .* 4 cores"):
        threads_within(5)
