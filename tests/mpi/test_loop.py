"""A step is a loop over its rounds. It continues after a break; after an error, `reset` begins it anew."""

from functools import partial

import pytest
import tiny

from zero_mpi import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, GradAccum, ShardedAdamW, cross_entropy

CONFIG = tiny.MODELS["llama tied"]
COUNT = 5  # micro-batches a step
STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD]


def read(step, number):
    if number is None:
        return None, None
    x, targets = tiny.micro_batch(step, number, CONFIG)
    return x, partial(cross_entropy, targets=targets, scale=1e-2)


class Run:
    def __init__(self, comm, strategy=FULL_SHARD):
        self.module = tiny.make(comm, CONFIG, strategy, bucket_mb=0.02)
        self.optimizer, self.accum = ShardedAdamW(self.module, lr=1e-2), GradAccum(self.module, COUNT)

    def rounds(self, step):
        numbers = []
        for micro_batch in self.accum:
            numbers.append(micro_batch)
            self.accum.accumulate(*read(step, micro_batch))
        return numbers

    def end(self):
        loss, norm = self.accum.total_loss(), self.optimizer.step(max_norm=1.0).grad_norm
        return loss, norm, tiny.digest(self.module.state_dict())


@pytest.fixture
def unbroken(exact):
    run = Run(exact)
    run.rounds(0)
    return run.end()


class Broken(Exception):
    """Error that a test raises while data are read or a loss is computed."""


def test_the_loop_gives_each_micro_batch_to_one_rank(exact):
    run, size = Run(exact), exact.size
    for step in range(2):
        numbers = run.rounds(step)
        assert numbers == [run.accum.rounds.micro_batch(i) for i in range(-(-COUNT // size))]
        union = [number for of_rank in exact.allgather_object(numbers) for number in of_rank]
        assert sorted(number for number in union if number is not None) == list(range(COUNT))
        assert run.accum.complete
        run.end()


def test_a_loop_that_was_left_goes_on_where_it_stopped(exact, unbroken):
    run = Run(exact)
    for micro_batch in run.accum:
        run.accum.accumulate(*read(0, micro_batch))
        break
    if not run.accum.complete:
        assert len(run.rounds(0)) == len(run.accum.rounds) - 1
    assert run.end() == unbroken


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_an_error_between_rounds_reset_begins_the_step_anew(exact, strategy, unbroken):
    run = Run(exact, strategy)

    def failing():
        for number, micro_batch in enumerate(run.accum):
            if number == len(run.accum.rounds) - 1:
                raise Broken
            run.accum.accumulate(*read(9, micro_batch))

    with pytest.raises(Broken):
        failing()
    run.accum.reset()
    assert len(run.rounds(0)) == len(run.accum.rounds)
    assert run.end() == unbroken


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_an_error_inside_a_round_it_must_be_reset(exact, strategy, unbroken):
    run = Run(exact, strategy)

    def failing(logits):
        raise Broken

    for _ in range(3):
        run.accum.rounds.micro_batches = max(COUNT, exact.size)  # each rank has a micro-batch, so all fail
        with pytest.raises(Broken):
            run.accum.accumulate(read(0, 0)[0], failing)
        with pytest.raises(ValueError, match=r"round 0 of .* ended in an error; call GradAccum\.reset"):
            run.accum.accumulate(*read(0, 0))
        run.accum.rounds.micro_batches = COUNT
        run.accum.reset()
    run.rounds(0)
    assert run.end() == unbroken


def test_a_round_without_accumulate_is_an_error(exact):
    run = Run(exact)
    with pytest.raises(ValueError, match=r"round 0 of \d was not accumulated; expected one call"):
        for _ in run.accum:
            pass
    assert exact.allgather_object("on") == ["on"] * exact.size


def test_ranks_without_anything_to_compute_are_told_once(exact, caplog):
    module = tiny.make(exact, CONFIG)
    with caplog.at_level("WARNING", "zero_mpi"):
        GradAccum(module, exact.size)
        assert caplog.messages == []
        GradAccum(module, 1)
    idle = exact.size - 1
    expected = [f"{idle} of {exact.size} ranks have nothing to compute: a step has 1 micro-batch(es); start"]
    expected = expected if idle and exact.rank == 0 else []
    assert [message[: len(expected[0])] for message in caplog.messages] == expected
