"""Progress lines: the right ones, in order, never at the price of the run."""

import io
import os

from ppsmoke.report.progress import KEPT_LOGS, QUIET, VERBOSE, Progress, open_log
from ppsmoke.report.summary import RunRecord


def a_record():
    return RunRecord(run_id="r", model_name="m", num_stages=2)


def test_lines_say_phase_and_stage_and_quiet_says_nothing_of_them():
    for verbosity, expected in ((QUIET, ""), (0, "load: stage 1: ready")):
        stream = io.StringIO()
        progress = Progress(a_record(), stream=stream, verbosity=verbosity)
        progress.phase("load")
        progress.say("ready", stage=1)
        assert expected in stream.getvalue() and bool(expected) == bool(stream.getvalue())


def test_loading_lines_are_at_most_one_a_second_for_each_stage_but_all_are_logged(tmp_path):
    stream = io.StringIO()
    log = open_log(tmp_path, "r")
    progress = Progress(a_record(), stream=stream, log=log)
    for done in range(50):
        progress.loading(0, "reading", done * 1_000_000, 50_000_000)
        progress.loading(1, "reading", done * 1_000_000, 50_000_000)
    progress.close()
    assert stream.getvalue().count("stage 0") == stream.getvalue().count("stage 1") == 1
    assert open(progress.record.log_path).read().count("stage 1") == 50


def test_a_childs_lines_are_shown_only_when_asked_for():
    stream = io.StringIO()
    Progress(a_record(), stream=stream).child_line(0, "hello")
    assert not stream.getvalue()
    Progress(a_record(), stream=stream, verbosity=VERBOSE).child_line(0, "hello")
    assert "stage 0 | hello" in stream.getvalue()


def test_a_closed_terminal_does_not_end_the_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    progress = Progress(a_record(), stream=Gone())
    progress.phase("rent")
    progress.say("still here")
    progress.phase("")
    assert "rent" in progress.record.phases_s


def test_the_log_folder_is_made_private_and_keeps_the_newest_only(tmp_path):
    folder = tmp_path / "deep" / "logs"
    for number in range(KEPT_LOGS + 5):
        open_log(folder, f"run{number}").close()
    names = os.listdir(folder)
    assert len(names) == KEPT_LOGS and any(f"run{KEPT_LOGS + 4}" in name for name in names)
    assert os.stat(folder / names[0]).st_mode & 0o077 == 0


def test_where_no_log_can_be_written_there_is_none_and_no_error(tmp_path):
    (tmp_path / "file").touch()
    assert open_log(tmp_path / "file" / "logs", "r") is None
    assert Progress(a_record(), stream=io.StringIO()).record.log_path is None
