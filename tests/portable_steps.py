"""Print digests of elementary functions, twenty steps of each architecture and the trial of operations.

ZERO_MPI_BITS selects native or portable bits; an emulator simulates a processor. Models are tiny, because an
emulated processor is slow; the trial multiplies larger matrices. A decreasing learning rate, clipping, decay
and rotary tables are used as in training. Arguments are architectures, by default all.
"""

import hashlib
import sys

import architectures
import numpy as np

from zero_mpi import FULL_SHARD, GradAccum, SerialComm, ShardedAdamW, ShardedModule, nn
from zero_mpi.config.optimizer import schedule_of
from zero_mpi.config.settings import Config
from zero_mpi.environment import portable
from zero_mpi.launch.consistency import check_pins
from zero_mpi.ops import elementary, trial

SIZES = {"vocab_size": 40, "context_length": 12, "embedding_length": 16, "feed_forward_length": 24}
SIZES |= {"head_count": 2, "head_count_kv": 1, "key_length": 8, "value_length": 8}
STEPS, MICRO_BATCHES, SEQUENCES = 20, 2, 2


def tokens_of(step, index):
    shape = SEQUENCES, SIZES["context_length"] + 1
    tokens = (np.arange(shape[0] * shape[1]) * 7919 + 31 * step + index) % 1009 % SIZES["vocab_size"]
    return tokens.reshape(shape)[:, :-1], tokens.reshape(shape)[:, 1:]


def trained(arch):
    module = ShardedModule(architectures.build(arch, SIZES).stages(), SerialComm(), FULL_SHARD)
    module.initialize(seed=3)
    optimizer, accumulator = ShardedAdamW(module, lr=1e-2), GradAccum(module, MICRO_BATCHES)
    rate = schedule_of(Config(lr=1e-2, min_lr=1e-3, warmup=3, steps=STEPS))
    digest = hashlib.sha256()
    for step in range(STEPS):
        for index in accumulator:
            tokens, targets = tokens_of(step, index)
            accumulator.accumulate(tokens, nn.CrossEntropy(targets, 1 / (MICRO_BATCHES * targets.size)))
        loss, norm = accumulator.total_loss(), optimizer.step(rate(step), max_norm=0.5).grad_norm
        digest.update(f"{loss!r} {norm!r}\n".encode())
    for _, values in sorted(module.state_dict().items()):
        digest.update(np.ascontiguousarray(values).tobytes())
    return f"{digest.hexdigest()[:16]} loss {loss:.6f}"


def functions():
    x, generator = np.arange(1, 20001) * 0.0137, np.random.Generator(np.random.Philox(key=5))
    arrays = [elementary.cosines(x), elementary.sines(x), elementary.normals(generator, x.size)]
    arrays += [[of(each) for each in x[:500].tolist()] for of in (elementary.log, elementary.cosine)]
    arrays += [elementary.power(0.95, x[:500]), [elementary.power(0.999, step) for step in range(500)]]
    return hashlib.sha256(b"".join(np.asarray(values).tobytes() for values in arrays)).hexdigest()[:16]


def main(names):
    print("functions", functions(), flush=True)
    if portable.requested() == portable.PORTABLE:
        check_pins()
    for arch in [name for name in architectures.ROWS if not names or name in names]:
        print(arch, trained(arch), flush=True)
    print("trial", trial.digest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
