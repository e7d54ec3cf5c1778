"""A run with --schedule wsd that is lengthened before its decay has the bytes of the longer run."""

from test_command_bits import fields, needs_mpiexec, train, write_text

SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16", "--sample", "0"]
SMALL += ["--batch-size", "7", "--micro-batch", "2", "--warmup", "2", "--lr", "0.01", "--min-lr", "0.002"]
SMALL += ["--schedule", "wsd", "--decay-steps", "4"]


@needs_mpiexec
def test_a_run_made_longer_before_it_decays_is_the_longer_run(tmp_path):
    flags = [*SMALL, "--data", *write_text(tmp_path)]
    train(1, tmp_path / "whole", *flags, "--steps", "9")
    train(2, tmp_path / "out", *flags, "--steps", "7", "--save-every", "3", "--keep", "0")
    folder = str(tmp_path / "out" / "step-00000003")
    said = train(1, tmp_path / "more", *flags, "--steps", "9", "--resume", folder)
    assert "--steps was 7, now 9" in said
    assert fields(tmp_path / "more") == fields(tmp_path / "whole")[3:]
