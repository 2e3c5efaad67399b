"""A history in a folder is read unchanged."""

from headwise.monitoring.alarms import AlarmLimits
from headwise.monitoring.history import History
from histories import history, rows


def test_statistics_that_some_heads_lack_are_read_as_written(tmp_path):
    """Only the second layer has a softcap."""
    written = history(2, 3, (), None, folder=tmp_path)
    numbers = [{"max_logit": 3.0}, {"max_logit": 3.0, "max_logit_uncapped": 7.0}]
    written.append(4, rows(2, 3, lambda layer, head: numbers[layer]))
    loaded = History.load(tmp_path)
    assert loaded.rows() == written.rows()
    assert loaded.statistics == ("max_logit", "max_logit_uncapped")
    assert [head for head, _, _ in loaded.series("max_logit_uncapped")] == [(1, 0), (1, 1), (1, 2)]
    limits = AlarmLimits(max_logit=5.0)
    assert [(alarm.layer, alarm.head) for alarm in limits.alarms(loaded.rows(4))] == [(1, 0), (1, 1), (1, 2)]


def test_the_step_that_is_being_written_is_not_read(tmp_path):
    history(1, 2, (0, 5), lambda *_: 1.0, folder=tmp_path)
    (tmp_path / "steps" / "000000000010.parquet.part").write_bytes(b"PAR1")
    assert History.load(tmp_path).steps == [0, 5]
