"""What a writer is given is read back from TensorBoard files."""

import numpy as np
import pytest

from tpu_embed.metrics import write_scalars

STATISTICS = {
    "tables": {"films": {"norm": 2.5, "slots": {"accumulators": {"mean": 0.1}}}},
    "batch": {"films": {"ids": 3, "hottest": [(7, 3)]}},
    "bad_ids": {"user/history": np.int64(2)},
    "step": 4,
}
TAGS = {
    "tables/films/norm": 2.5,
    "tables/films/slots/accumulators/mean": 0.1,
    "batch/films/ids": 3,
    "bad_ids/user/history": 2,
    "step": 4,
}


def test_tensorboard_reads_every_number_under_its_names(tmp_path):
    tensorboard = pytest.importorskip("tensorboardX", reason="tpu-embed[tensorboard] is not there")
    from tensorboardX.proto.event_pb2 import Event

    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        write_scalars(writer, 9, STATISTICS)
    found = {}
    for record in _records(next(tmp_path.iterdir()).read_bytes()):
        event = Event.FromString(record)
        for value in event.summary.value:
            found[value.tag] = value.simple_value
            assert event.step == 9
    assert found == pytest.approx(TAGS)


def _records(data):
    """Yield the records of an event file: length, checksum, bytes, checksum."""
    while data:
        size = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + size]
        data = data[16 + size :]
