"""Preference losses match an independent program in values and gradients; pairs become windows."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from chat_templates import CHATML, chat_tokenizer
from corpora import load_corpus

from zero_mpi import FULL_SHARD, SerialComm, ShardedModule
from zero_mpi.arguments import UNCOUNTED
from zero_mpi.config.command_line import parse
from zero_mpi.data.conversations.formats import BadRows, one_pair
from zero_mpi.data.conversations.tokenized import ConversationReader
from zero_mpi.data.documents import Document, stream_of
from zero_mpi.data.packing import PairWindows
from zero_mpi.errors import FileError, UsageError
from zero_mpi.models.lora import FROZEN, LoRA
from zero_mpi.nn.loss import PartLosses
from zero_mpi.nn.preference import PREFERENCES, Preference
from zero_mpi.train.objective import PairStep, as_input
from zero_mpi.train.resolve import fitted

VALUES = {  # (loss, d loss / d C); log-likelihoods C = -12, R = -15 of 6 and 5 tokens; reference -13, -14.5
    ("dpo", 0.1, 0.0): (0.6209570477895321, -0.04625701546562505),
    ("dpo", 0.1, 0.1): (0.6359570477895321, None),
    ("ipo", 0.1, 0.0): (22.404444444444444, -1.5777777777777777),
    ("simpo", 2.0, 0.0): (0.2014132779827524, -0.060808507935452116),
    ("orpo", 0.1, 0.0): (2.128875078434462 - 2.1, -0.029005590364152633 / 6),
}


@pytest.mark.parametrize("case", VALUES)
def test_losses_of_a_pair_have_known_values(case):
    loss = Preference(*case)
    score = loss.score([0, 1], [1.0, -0.5] if loss.has_reference else [-12.0, -15.0], [6, 5])
    expected, slope = VALUES[case]
    assert score.terms == pytest.approx([expected], rel=1e-13)
    assert slope is None or score.slopes[0] == pytest.approx(slope, rel=1e-12)


def test_losses_of_an_answer_have_known_values():
    kto = Preference("kto")
    score = kto.score([0, 1], [1.0, -0.5], [3, 3], kl=0.4)
    assert score.terms == pytest.approx([0.48500449838059, 0.47751517520819986], rel=1e-13)
    assert score.slopes[0] == pytest.approx(-0.024977513493118227, rel=1e-12)
    assert math.isnan(kto.score([0], [math.nan], [1]).terms[0])


# ----------------------------------------------------------------------- comparison with another program


def sides(*sizes):
    rng, documents = np.random.default_rng(0), []
    for number, (prompt, *answers) in enumerate(sizes):
        ids = [rng.integers(0, 61, 0 if n is None else prompt + n) for n in answers]
        masks = [np.arange(len(each)) >= prompt for each in ids]
        ends = np.cumsum([len(each) for each in ids])
        documents.append(Document(str(number), np.concatenate(ids), b"", np.concatenate(masks), ends))
    return stream_of(documents)


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def of_answers(loss, x, kl):
    """Return KTO's loss over all answers."""
    signs, weights = np.array([1, -1] * (len(x) // 2)), (loss.desirable_weight, loss.undesirable_weight)
    return np.mean(np.tile(weights, len(x) // 2) * (1 - sigmoid(signs * loss.beta * (x - kl))))


def program(loss, logits, step, pairs):
    """Return loss, gradient with respect to the logits, sums and counts per answer, in float64."""
    logp, targets = log_softmax(logits), pairs.batch.targets
    labels = np.where(targets == UNCOUNTED, pairs.rest, targets)

    def total(row, span, ids):
        return sum(logp[row, t, ids[row, t]] for t in range(span.start, span.stop) if ids[row, t] >= 0)

    answers = np.array([total(row, span, targets) for row, span in pairs.spans])
    nll = sum(total(*pairs.spans[k], labels) for k in range(0, len(pairs.spans), 2))
    count = np.array([(targets[row, span] >= 0).sum() for row, span in pairs.spans])
    size = sum(span.stop - span.start for _, span in pairs.spans[::2])

    def value(sums, beta=loss.beta):
        x = sums - step.reference
        if loss.name == "kto":
            return of_answers(loss, x, step.kl)
        a, b = x[::2], x[1::2]
        na, nb = a / count[::2], b / count[1::2]
        e = loss.label_smoothing

        def odds():
            return na - nb - np.log((1 - np.exp(na)) / (1 - np.exp(nb)))

        return {
            "dpo": lambda: -(1 - e) * np.log(sigmoid(beta * (a - b))) - e * np.log(sigmoid(-beta * (a - b))),
            "ipo": lambda: (na - nb - 1 / (2 * beta)) ** 2,
            "simpo": lambda: -np.log(sigmoid(beta * (na - nb) - loss.simpo_gamma)),
            "orpo": lambda: -beta * np.log(sigmoid(odds())) - nll / size,
        }[loss.name]().mean()

    gradient, h = np.zeros_like(logits), 1e-5
    for k, (row, span) in enumerate(pairs.spans):
        move = h * (np.arange(len(answers)) == k)
        slope = (value(answers + move) - value(answers - move)) / (2 * h)
        for t in range(span.start, span.stop):
            for ids, weight in ((targets, slope), (labels, -(k % 2 == 0) / size * (loss.name == "orpo"))):
                if ids[row, t] >= 0 and weight:
                    gradient[row, t] += weight * ((np.arange(61) == ids[row, t]) - np.exp(logp[row, t]))
    return value(answers), gradient, answers, count


@pytest.mark.parametrize("name", PREFERENCES)
def test_losses_gradients_and_figures_are_those_of_another_program(name):
    loss = Preference(name, 0.7, 0.1 if name == "dpo" else 0.0, 0.3, 1.5, 0.8)
    windows = PairWindows(sides((3, 2, 1), (1, 3, 4), (2, 1, 2), (4, 5, 3)), 11)
    module = tiny.make(SerialComm(), tiny.MODELS["llama"])
    step = PairStep(loss, windows, [np.arange(len(windows))])
    if loss.has_reference:
        step.reference = np.random.default_rng(1).normal(-9, 1, 8)
    step.kl = 0.2
    x, criterion = step.micro(0)
    pairs = windows.pairs(np.arange(len(windows)))
    logits = module.forward(x, training=True)
    expected, dlogits, answers, count = program(loss, np.asarray(logits, np.float64), step, pairs)
    module.backward(dlogits.astype(np.float32))
    module.sync_gradients()
    by_program = {key: value.copy() for key, value in module.named_gradients()}
    module.zero_gradients()
    actual = module.forward_backward(x, criterion)
    module.sync_gradients()
    assert actual == pytest.approx(expected, rel=2e-6)
    for key, value in module.named_gradients():
        np.testing.assert_allclose(value, by_program[key], rtol=1e-3, atol=2e-6, err_msg=key)
    figures, x = step.figures(step.sums), answers - step.reference
    rewards = loss.beta * (x if loss.has_reference else x / count)
    logps = answers if loss.has_reference else answers / count
    means = {"rewards/chosen": rewards[::2].mean(), "rewards/rejected": rewards[1::2].mean()}
    means |= {"rewards/margins": (rewards[::2] - rewards[1::2]).mean()}
    means |= {"rewards/accuracies": (rewards[::2] > rewards[1::2]).mean()}
    means |= {"logps/chosen": logps[::2].mean(), "logps/rejected": logps[1::2].mean()}
    assert {key: figures[key] for key in means} == pytest.approx(means, rel=1e-4)
    assert step.loss(slice(None), np.reshape(step.sums, (8, -1)))[0] == pytest.approx(actual, rel=1e-12)


def test_without_adapters_a_model_is_its_base():
    config = tiny.MODELS["llama"]
    plain, x = tiny.make(SerialComm(), config), np.arange(11)[None]
    stages = LoRA(2, 4.0).adapt(config.stages())
    adapted = ShardedModule(stages, SerialComm(), FULL_SHARD, frozen=FROZEN)
    adapted.initialize(0)
    weights = plain.state_dict()
    rng = np.random.default_rng(0)
    adapted.load_state_dict({k: weights.get(k, rng.normal(0, 1, v.shape)) for k, v in adapted.params.items()})
    losses = partial(adapted.losses, x, PartLosses(x, [...]))
    assert losses(adapted=False) == plain.losses(x, PartLosses(x, [...]))
    assert losses() != losses(adapted=False)


# ------------------------------------------------------------------------------------------ pairs as data

USER, BOT = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
OTHER = {"role": "assistant", "content": "b"}
FORMS = [
    (
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        ("The sky is", " blue.", " green."),
    ),
    ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, ("The sky is", " blue.", " green.")),
    ({"prompt": [USER], "chosen": [BOT], "rejected": [OTHER]}, ("q", "a", "b")),
    ({"prompt": "q", "chosen": [USER, BOT], "rejected": [USER, OTHER]}, ("q", "a", "b")),
    ({"chosen": [USER, BOT], "rejected": [USER, OTHER], "prompt": None}, ("q", "a", "b")),
    ({"prompt": "q", "completion": "a", "label": True}, ("q", "a", None)),
    ({"prompt": [USER], "completion": [OTHER], "label": False}, ("q", None, "b")),
    ({"prompt": "q", "chosen": [BOT], "rejected": [OTHER]}, ("q", "a", "b")),
]


@pytest.mark.parametrize(("row", "expected"), FORMS)
def test_pairs_of_all_forms(row, expected):
    spoken = one_pair("x:1", row | {"system": "s"}, labels=True)
    assert {side.messages[0]["content"] for side in spoken if side is not None} == {"s"}
    pair = one_pair("x:1", row, labels=True)
    for side, text in zip(pair, expected[1:], strict=True):
        contents = None if side is None else [message["content"] for message in side.messages]
        assert contents == (None if text is None else [expected[0], text])
        assert side is None or side.turns == [1]


BAD = [
    {"chosen": "a", "rejected": "b"},
    {"prompt": "q", "chosen": "a"},
    {"prompt": "q", "chosen": ["a"], "rejected": [OTHER]},
    {"prompt": [USER], "chosen": [USER], "rejected": [OTHER]},
    {"prompt": "q", "completion": "a"},
    [],
]


@pytest.mark.parametrize("row", BAD, ids=str)
def test_bad_pairs_are_named_or_left_out(row, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in (FORMS[0][0], row, FORMS[2][0])))
    reader = ConversationReader(chat_tokenizer(CHATML))
    with pytest.raises(FileError, match=r"pairs\.jsonl, line 2: .*--skip-bad"):
        list(reader.read_pairs([("pairs.jsonl", path)], labels=True))
    bad = BadRows()
    assert len(list(reader.read_pairs([("pairs.jsonl", path)], bad, labels=True))) == 2
    assert bad.counts.total() == 1


def corpus(folder, rows, loss, **extra):
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"val_fraction": 0.0, "context": 64, "seed": 0, "vocab_size": 400} | extra
    paths, tokenizer = [str(folder / "pairs.jsonl")], chat_tokenizer(CHATML)
    return load_corpus(paths, tokenizer=tokenizer, preferences=loss, **options)


def test_what_counts_of_a_pair_is_each_answer_to_the_end_of_its_turn(tmp_path):
    stream = corpus(tmp_path, [FORMS[0][0], FORMS[2][0]], "dpo").train
    decode, ends = chat_tokenizer(CHATML).decode, stream.ends.tolist()
    read = [
        decode(stream.ids[a:b][stream.counted[a:b]].tolist()) for a, b in zip([0, *ends], ends, strict=False)
    ]
    assert [text.replace(b"<|im_end|>", b"") for text in read] == [b" blue.", b" green.", b"a", b"b"]
    split = corpus(tmp_path, [FORMS[0][0]] * 9, "dpo", val_fraction=0.3)
    assert [len(side.ends) % 2 for side in (split.train, split.val)] == [0, 0], "a pair must not be split"
    assert split.val_documents == 3


@pytest.mark.parametrize(("rows", "loss"), [([FORMS[0][0]], ""), ([FORMS[5][0]], "dpo"), ([{"a": 1}], "kto")])
def test_a_loss_and_its_data_belong_together(rows, loss, tmp_path):
    with pytest.raises(UsageError, match="--loss"):
        corpus(tmp_path, rows, loss)


@pytest.mark.parametrize("rows", [[FORMS[2][0]], [FORMS[5][0]], [FORMS[5][0], FORMS[0][0], FORMS[6][0]]])
def test_the_default_context_is_as_long_as_the_longest_row(rows, tmp_path):
    data, config = corpus(tmp_path, rows, "kto"), parse(["--init", "m.gguf", "--data", "x", "--loss", "kto"])
    model = SimpleNamespace(embedding_length=8, context_length=999)
    spec = SimpleNamespace(config=config, model=model, default_names={*config.default_names})
    config, loader, _ = fitted(spec, data)
    assert loader.windows.pieces.cut == 0
    longest = max(int(loader.windows.sequences([n])[2].sum()) for n in range(len(loader.windows)))
    assert config.context == longest


@pytest.mark.parametrize("packs", [True, False])
def test_both_sides_of_a_pair_are_in_one_window_cut_alike(packs):
    windows = PairWindows(sides((3, 2, 1), (5, 3, 30), (2, 1, 2), (4, None, 3)), 24, packs)
    for index in range(len(windows)):
        pairs = windows.pairs([index])
        assert all(span.stop <= 24 for _, span in pairs.spans)
        by_pair = {
            int(n) // 2: [int(m) % 2 for m in pairs.numbers if m // 2 == n // 2] for n in pairs.numbers
        }
        assert all(members == ([1] if pair == 3 else [0, 1]) for pair, members in by_pair.items())
        for (_, span), count in zip(pairs.spans, windows.sequences([index])[1], strict=True):
            assert (pairs.batch.begins[0, span] == span.start).all()
            assert (pairs.batch.targets[0, span] >= 0).sum() == count
    assert (windows.pieces.cut, len(windows) < 4) == (1, packs)
    sizes = windows.sequences(np.arange(len(windows)))
    assert dict(zip(*sizes[::2], strict=True))[3] == 24 - 7, "the longer one gets the rest"


def test_mismatched_prompts_have_answers_to_others_in_as_much_room():
    windows = PairWindows(sides((3, 2, 1), (1, 3, 4), (2, 1, 2)), 40)
    pairs = windows.pairs([0])
    mixed = windows.mismatched([0])
    used = [(each.batch.begins != np.arange(40)).sum() for each in (pairs, mixed)]
    assert used[0] == used[1]

    before = {0: 5, 2: 0, 4: 2, 1: 4, 3: 1, 5: 3}  # sequence -> sequence whose answer it gets
    for n in range(6):
        assert text(mixed, n) == (text(pairs, n)[0], text(pairs, before[n])[1])
    assert as_input(mixed.batch).ids.shape == (1, 40)


def text(each, n):
    (row, span), ids = each.spans[n], each.batch
    first = int(np.argmax(ids.targets[row, span] >= 0))
    return ids.inputs[row, span][: first + 1].tolist(), ids.targets[row, span][first:].tolist()


@pytest.mark.parametrize(("context", "packs"), [(24, False), (12, False), (12, True), (17, True)])
def test_a_prompt_never_has_an_answer_to_itself(context, packs):
    """An answer that is alone in its window, or beside only its own pair, gets another row's."""
    stream = sides((3, None, 2), (4, 5, None), (2, 6, 1), (3, 3, 8), (1, 2, None))
    windows = PairWindows(stream, context, packs)
    everything = np.arange(len(windows))
    pairs, mixed = windows.pairs(everything), windows.mismatched(everything)
    answers = {int(n): text(pairs, place)[1] for place, n in enumerate(pairs.numbers)}
    assert mixed.numbers.tolist() == [*answers]
    for place, n in enumerate(mixed.numbers):
        prompt, answer = text(mixed, place)
        assert prompt == text(pairs, place)[0]
        sources = {m // 2 for m in answers if answer and answers[m][: len(answer)] == answer}
        assert sources - {n // 2}, "it is the answer of another row"
    assert all(span.stop <= context for _, span in mixed.spans)
    for index in everything:  # the micro-batch has no effect
        single = windows.mismatched([index])
        row = [place for place, (row, _) in enumerate(mixed.spans) if row == index]
        assert [text(single, n) for n in range(len(row))] == [text(mixed, n) for n in row]
