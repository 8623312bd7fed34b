"""Engines, the processes of ranks, and labs on them: what they answer, and what happens when one fails."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import ipyparallel
import psutil
import pytest

from memlab import JobRecord, Lab, Layout, MemorySettings, Ranks, TrainingState
from memlab.cli import main
from memlab.commands.shared.process import terminate_on_signal
from memlab.config.scenario import Scenario
from memlab.lab import many_ranks
from memlab.lab.many_ranks import ManyRanks
from memlab.lab.rank import Rank
from memlab.lab.state_changes import ModelLost
from memlab.ranks import engine, group, messages
from memlab.ranks.fork_server import _ForkServer
from memlab.ranks.forked_process import ADDRESS_VARIABLE, NUMBER
from memlab.ranks.group import RankFailed, RankGroup
from memlab.ranks.guard import PROFILE
from memlab.ranks.process_log import ProcessLog
from memlab.ranks.rank_process import Whereabouts, queued_seconds
from memlab.ranks.ranks import NO_ENGINE, Engine, _lacks_memory, _require_equal_versions, why_lost
from tests.unit.inside import ranks_of

from .served import number_of_process, use_fork_server, without_memory

pytestmark = pytest.mark.slow

SERVED = "tests.unit.served:Served"
TINY = {"architecture": "qwen3-moe-tiny", "num_layers": 2, "seq_length": 64, "backend": "cpu"}
FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.start(2) as started:
        yield started


@pytest.fixture(params=["forked", "started"])
def pair(ranks: Ranks, request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """Two processes of either kind: the engines start processes themselves where there is no fork server."""
    ranks.refresh()
    addresses = [ask(ranks, rank, use_fork_server, None) for rank in range(2)] if request.param == "started" else []
    pair = RankGroup(ranks, 2, SERVED)
    yield pair
    pair.end()
    for rank, address in enumerate(addresses):
        with suppress(*NO_ENGINE, ipyparallel.error.RemoteError):  # the test has ended it
            ask(ranks, rank, use_fork_server, address)


def ask(ranks: Ranks, rank: int, function: Any, *arguments: Any) -> Any:
    return ranks.call(ranks.engines[rank].number, function, *arguments).get(10)


def process_of(ranks: Ranks, rank: int) -> psutil.Process:
    deadline = time.monotonic() + 60
    while (number := ask(ranks, rank, number_of_process)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return psutil.Process(number)


def test_every_rank_answers_in_order_and_rank_0_reports_progress(pair: RankGroup) -> None:
    reported: list[str] = []
    answers = pair.call("answer", [("a",), ("b",)], reported.append)
    assert [value for _, value in answers] == ["a", "b"]
    assert len({pid for pid, _ in answers}) == 2
    assert reported == ["a"]
    assert pair.call("answer", [("only rank 0",)])[0][1] == "only rank 0"


def test_a_notice_reaches_a_rank_that_is_busy(pair: RankGroup) -> None:
    threading.Timer(0.3, pair.notify, ("note", "heard")).start()
    pair.call("sleep", [(1.5,), (1.5,)])
    assert pair.call("noted", [(), ()]) == ["heard", "heard"]


def test_an_error_of_all_ranks_is_raised_and_the_ranks_live_on(pair: RankGroup) -> None:
    with pytest.raises(ValueError, match=r"^refused by all$"):
        pair.call("fail", [("refused by all",), ("refused by all",)])
    assert pair.call("answer", [(1,), (2,)])[1][1] == 2


def test_an_error_of_one_rank_names_it_and_ends_all(ranks: Ranks, pair: RankGroup) -> None:
    processes = [process_of(ranks, rank) for rank in range(2)]
    with pytest.raises(RankFailed, match=r"rank 1 failed \(ValueError: only here\); the processes of all ranks were"):
        pair.call("fail", [("",), ("only here",)])
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert RankGroup(ranks, 2, SERVED).call("answer", [(1,), (2,)])[0][1] == 1, "the same engines serve the next group"


@pytest.mark.parametrize(
    ("provoke", "words"),
    [
        (lambda process: process.kill(), r"rank 1 is lost: its process on engine .* was ended by signal 9 \(by hand"),
        (lambda process: process.suspend(), r"rank 1 is lost: its process on engine .* has not answered for 3 s"),
    ],
)
def test_a_process_that_is_gone_or_stopped_is_named(
    ranks: Ranks,
    pair: RankGroup,
    monkeypatch: pytest.MonkeyPatch,
    provoke: Callable[[psutil.Process], None],
    words: str,
) -> None:
    monkeypatch.setattr(group, "SILENT_SECONDS", 3.0)
    process = process_of(ranks, 1)
    threading.Timer(0.5, provoke, (process,)).start()
    with pytest.raises(RankFailed, match=words):
        pair.call("sleep", [(60,), (60,)])
    assert psutil.wait_procs([process], timeout=10)[1] == []


def test_a_process_that_ends_says_what_it_printed_last(pair: RankGroup) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 is lost: .* ended with code 3; it printed last: the last words"):
        pair.call("leave", [(3,), (None,)])


@pytest.mark.parametrize("method", ["sleep", "compute"])
def test_a_rank_that_does_not_end_is_named(pair: RankGroup, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(group, "STALL_SECONDS", 2.0)
    monkeypatch.setattr(group, "_MOST_CPU_SECONDS", 1.0)
    forever = {"sleep": 60, "compute": True}[method]
    with pytest.raises(RankFailed, match=rf"rank 1 has made no progress for \d+ s \(rank 1 is in {method} \("):
        pair.call(method, [(0,), (forever,)])


def test_a_lost_engine_is_named_and_replaced(ranks: Ranks, pair: RankGroup) -> None:
    lost = ranks.engines[1]
    threading.Timer(0.5, os.kill, (lost.pid, signal.SIGKILL)).start()
    with pytest.raises(RankFailed, match=rf"rank 1 is lost: engine \d+ \(process {lost.pid} on .*\) has ended"):
        pair.call("sleep", [(60,), (60,)])
    ranks.refresh()
    assert len(ranks) == 2
    assert lost.pid not in {one.pid for one in ranks.engines}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing ends a process whose threads cannot run")
def test_a_process_in_which_no_thread_runs_ends_with_its_engine(ranks: Ranks, pair: RankGroup) -> None:
    process = process_of(ranks, 1)
    ranks.call(ranks.engines[1].number, engine.send, ranks.owner, messages.request(1, "hold_the_lock", ()))
    time.sleep(0.5)
    os.kill(ranks.engines[1].pid, signal.SIGKILL)
    assert psutil.wait_procs([process], timeout=10)[1] == []


def test_only_this_user_can_read_the_keys_and_only_this_machine_can_reach_the_processes(ranks: Ranks) -> None:
    ranks.refresh()
    assert ranks._local is not None
    folder = Path(ranks._local.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted((folder / "security").glob("ipcontroller-*.json"))
    assert [path.stem.rpartition("-")[2] for path in files] == ["client", "engine"]
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_text())["key"].encode() == ranks.client.session.key != b""
    with Lab(**TINY, layout=Layout(data_parallel_size=2), ranks=ranks):
        of_ranks = {process_of(ranks, rank).pid for rank in range(2)}
        listening = listening_addresses(folder)
    assert {one.pid for one in ranks.engines} | of_ranks <= listening.keys(), "they have sockets for others"
    assert set().union(*listening.values()) == {"127.0.0.1"}


def listening_addresses(folder: Path) -> dict[int, set[str]]:
    """Returns where each process of a cluster waits for connections, by the number of the process."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or it has just ended
            if process.environ().get(PROFILE) == str(folder):
                sockets = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
                found[process.pid] = {one.laddr.ip for one in sockets}
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
def test_processes_end_with_the_fork_server_and_engines_start_the_next_ones_themselves() -> None:
    with Ranks.start(1) as ranks:
        assert ranks._local is not None
        forked = RankGroup(ranks, 1, SERVED)
        process = process_of(ranks, 0)
        server = process.parent()
        assert server is not None and "memlab.ranks.fork_server" in server.cmdline()
        assert server.environ()["IPP_PROFILE_DIR"] == ranks._local.folder, "the guard ends it too"
        threading.Timer(0.3, server.kill).start()
        with pytest.raises(RankFailed, match=r"rank 0 is lost: its process on engine .* was ended by signal 9"):
            forked.call("sleep", [(60,)])
        assert psutil.wait_procs([process], timeout=10)[1] == []
        assert RankGroup(ranks, 1, SERVED).call("answer", [(1,)])[0][1] == 1
        parent = process_of(ranks, 0).parent()
        assert parent is not None and parent.pid == ranks.engines[0].pid


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
def test_a_forked_process_has_the_folder_of_its_engine_whatever_the_size_of_its_environment(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert ranks._local is not None
    monkeypatch.setenv(ADDRESS_VARIABLE, f"{ranks._local.folder}/fork-server")
    monkeypatch.chdir(tmp_path)
    engine.start("a notebook", SERVED, {f"LARGE_{number}": "x" * 2**16 for number in range(6)})
    engine.send("a notebook", messages.request(1, "answer", (1,)))
    ended, answered = "", False
    while not ended and not answered:
        received, ended = engine.receive("a notebook", 10.0)
        answered = any(kind == "answer" for kind, _ in messages.read(received, 1, "here"))
    process = psutil.Process(number_of_process())
    parent = process.parent()
    assert parent is not None and "memlab.ranks.fork_server" in parent.cmdline()
    assert process.cwd() == str(tmp_path)
    engine.end("a notebook")


def test_engines_that_do_not_start_are_refused_with_the_end_of_their_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlab.ranks.ranks._START_SECONDS", -1)
    logs = r"(the last line of their logs is ['\"].+['\"]|they wrote no log)"
    rule = f"1 engines did not start within -1 s, and {logs}: start fewer"
    with pytest.raises(ValueError, match=rule) as refused:
        Ranks.start(1)
    assert tempfile.gettempdir() not in str(refused.value), "their folder is gone"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
def test_a_fork_server_that_cannot_fork_says_why_and_serves_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(reading))
    monkeypatch.setenv(ADDRESS_VARIABLE, str(tmp_path / "socket"))
    server = _ForkServer(str(tmp_path / "socket"))
    server._imported.add(SERVED.partition(":")[0])

    def serve() -> None:
        with suppress(SystemExit):
            server.run()

    serving = threading.Thread(target=serve)
    serving.start()
    for _ in range(2):
        engine.start("a notebook", SERVED, {})
        ended = ""
        while not ended and serving.is_alive():
            _, ended = engine.receive("a notebook", 10.0)
        assert ended.startswith("ended with code 1; it printed last: no process could be forked: ")
        assert ended.endswith("no more processes")
    engine.end("a notebook")
    os.close(writing)
    serving.join(10)
    assert not serving.is_alive(), "it ends with its standard input"
    server._listening.close()
    server._selector.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_fork_server_closes_the_files_of_a_request_whose_engine_has_ended(
    is_complete: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(reading))
    server = _ForkServer(str(tmp_path / "socket"))
    request = json.dumps([SERVED, str(tmp_path), {}]).encode()
    connection, other_end = multiprocessing.Pipe()
    printed, output = os.pipe()
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(tmp_path / "socket"))
        socket.send_fds(asking, [NUMBER.pack(len(request))], [other_end.fileno(), output])
        asking.sendall(request if is_complete else request[:-1])
    os.close(output)
    other_end.close()
    server._accept()
    os.set_blocking(printed, False)
    assert os.read(printed, 1) == b"", "nobody can write any more"
    assert connection.poll() and server._waiting == []
    server._listening.close()
    server._selector.close()
    connection.close()
    os.close(printed)
    os.close(writing)


def test_the_output_of_a_process_leaves_no_file_on_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = ProcessLog()
    os.write(log.file.fileno(), b"the last words")
    assert log.last_words(0).endswith("the last words")
    assert not list(tmp_path.iterdir()), "whoever has it open may be killed"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the memory of a process cannot be limited")
def test_a_rank_that_runs_out_of_host_memory_is_named(pair: RankGroup) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 ran out of host memory \(MemoryError\): start fewer ranks on this"):
        pair.call("take_memory", [(0,), (2**30,)])


def test_an_engine_that_has_just_been_killed_is_replaced(ranks: Ranks) -> None:
    lost = ranks.engines[0].pid
    os.kill(lost, signal.SIGKILL)
    ranks.refresh()
    assert len(ranks) == 2
    assert lost not in {one.pid for one in ranks.engines}


def test_an_engine_that_was_stopped_between_two_jobs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlab.ranks.ranks.ANSWER_SECONDS", 4.0)
    with Ranks.start(2) as ranks:  # a cluster of its own: its controller lists the ended engine for 30 s
        stopped = ranks.engines[1]
        os.kill(stopped.pid, signal.SIGSTOP)
        ranks.refresh()
        assert len(ranks) == 2 and stopped not in ranks.engines
        assert not psutil.pid_exists(stopped.pid)


def test_a_failure_says_where_it_was(pair: RankGroup) -> None:
    with pytest.raises(RankFailed) as failure:
        pair.call("leave", [("no code",), (None,)])
    cause = failure.value.__cause__
    assert isinstance(cause, TypeError)
    assert "in leave" in cause.__notes__[0]


def test_engines_serve_one_notebook_at_a_time(ranks: Ranks, pair: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks._local is not None
    other = Ranks(ranks._local.cluster.connect_client_sync(), None)
    # The other one does not end engines that serve this one, although none answers in time.
    monkeypatch.setattr("memlab.ranks.ranks._END_SECONDS", 0.0)
    with pytest.raises(ValueError, match=r"rank 0 cannot run on engine .*: the engine runs a rank of another notebook"):
        RankGroup(other, 2, SERVED)
    other.close()
    assert pair.call("answer", [(1,), (2,)])[0][1] == 1


def test_a_cell_that_connects_again_finds_the_engines_free(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks._local is not None
    ranks.end_processes(ranks.engines)
    clients = iter([ranks._local.cluster.connect_client_sync() for _ in range(2)])
    monkeypatch.setattr(ipyparallel, "Client", lambda **_: next(clients))
    former = Ranks.connect()
    RankGroup(former, 2, SERVED)
    with pytest.warns(UserWarning, match="closing the earlier connection of this process to the same engines"):
        again = Ranks.connect()
    assert former.closed
    assert RankGroup(again, 2, SERVED).call("answer", [(1,), (2,)])[1][1] == 2
    again.close()


def test_an_engine_ends_the_process_of_a_notebook_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LEASE_SECONDS", 0.5)
    engine.start("a notebook", SERVED, {})
    time.sleep(3)  # nobody asks for messages meanwhile
    messages, ended = engine.receive("a notebook", 0.0)
    while messages:
        messages, ended = engine.receive("a notebook", 0.0)
    assert "signal 9" in ended
    engine.end("a notebook")


def test_a_process_is_kept_only_for_the_same_object_and_the_same_variables() -> None:
    numbers = []
    for local_rank in ("1", "1", "0"):
        engine.start("a notebook", SERVED, {"LOCAL_RANK": local_rank})
        numbers.append(number_of_process())
    assert numbers[0] == numbers[1] != numbers[2], "another rank has another GPU"
    assert not psutil.pid_exists(numbers[0])
    engine.end("a notebook")


def test_an_engine_that_has_no_memory_to_answer_counts_as_silent(ranks: Ranks) -> None:
    answer = ranks.call(ranks.engines[0].number, without_memory)
    answer.wait(60)
    assert _lacks_memory(answer) and why_lost(answer.exception()) == "has no host memory left"
    assert not _lacks_memory(ranks.call(ranks.engines[0].number, engine.keep, "nobody"))


def test_a_rank_that_prints_for_days_fills_no_disk_and_its_last_words_are_kept() -> None:
    engine.start("a notebook", SERVED, {})
    assert engine._own is not None
    log = engine._own._log.file.fileno()

    def call(number: int, method: str, *args: object) -> tuple[list[bytes], str]:
        engine.send("a notebook", messages.request(number, method, args))
        answers: list[bytes] = []
        while True:
            answered, ended = engine.receive("a notebook", 10.0)
            answers += answered
            if ended or any(kind == "answer" for kind, _ in messages.read(answers, number, "here")):
                return answers, ended

    call(1, "chat", 3 * 2**20)
    assert os.fstat(log).st_size > 3 * 2**20
    call(2, "chat", 10)  # sending it shortens the log of before
    engine.keep("a notebook")
    assert os.fstat(log).st_size < 2**14
    _, ended = call(3, "leave", 4)
    assert ended == "ended with code 4; it printed last: " + " / ".join(
        ["the last words", "the first words", "x" * 10, "the last words", "the last words"]
    )
    engine.end("a notebook")


def test_engines_that_end_again_and_again_are_not_replaced_for_ever(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_left(*_: object) -> None:
        raise IndexError("it has just left")

    monkeypatch.setattr(ranks, "call", has_left)
    with pytest.raises(ValueError, match=r"^engines on this machine ended as soon as they had started, 3 times: look"):
        ranks.refresh()


def test_another_process_with_the_number_of_a_lost_engine_is_not_ended(ranks: Ranks) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ranks.kill(Engine(99, socket.gethostname(), other.pid, {}, started=1.0))
    assert other.poll() is None
    other.kill()
    other.wait()


def test_calls_leave_nothing_in_the_client(ranks: Ranks) -> None:
    client = ranks.client

    def most_kept() -> int:
        return max(map(len, (client.history, client.results, client.metadata, client.outstanding)))

    # A call to an engine that another test has ended is never answered.
    kept_before = most_kept()
    number = ranks.engines[0].number
    for _ in range(50):
        answer = ranks.call(number, engine.keep, "nobody")
        answer.get(10)
        # The client forgets a call when the engine says that it is idle, which comes after the result.
        assert answer.wait_for_output(10)
    assert most_kept() < kept_before + 10


def test_ranks_without_a_name_end() -> None:
    ranks = Ranks.start(1)
    started = psutil.Process(ranks.engines[0].pid)
    session = ManyRanks(Scenario.of("qwen3-moe-tiny"), ranks, "cpu", has_allocator=False)
    del ranks
    gc.collect()
    assert started.is_running(), "a lab holds them"
    session.close()
    del session
    gc.collect()
    assert psutil.wait_procs([started], timeout=20)[1] == []


def test_a_program_that_ends_without_closing_its_ranks_prints_nothing() -> None:
    # The engines are kept so often that one is kept while the connection closes.
    code = "from memlab.ranks import ranks; ranks._KEEP_SECONDS = 0.001; kept = ranks.Ranks.start(1)"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert ended.stdout + ended.stderr == ""


def test_ranks_that_were_closed_say_so_and_close_twice() -> None:
    closed = Ranks.start(1)
    group = RankGroup(closed, 1, SERVED)
    session = ManyRanks(Scenario.of("qwen3-moe-tiny"), closed, "cpu", has_allocator=False)
    session._group = group
    closed.close()
    closed.close()
    with pytest.raises(RankFailed, match="rank 0 is lost"):
        group.call("answer", [(1,)])
    with pytest.raises(
        ValueError, match=r"^these ranks are closed: start others, as with ranks = Ranks\.start\(1\), and"
    ):
        closed.refresh()
    with pytest.raises(ValueError, match=r"^these ranks are closed: start others"):
        session.apply(MemorySettings())
    session.close()


def test_ranks_with_different_versions_are_refused() -> None:
    engines = [Engine(0, "a", 1, {"torch": "2.13.0"}, 0.0), Engine(1, "b", 2, {"torch": "2.11.0"}, 0.0)]
    with pytest.raises(
        ValueError, match=r"torch is 2\.13\.0 on engine 0 .* and 2\.11\.0 on engine 1 \(process 2 on b\)"
    ):
        _require_equal_versions(engines)


@pytest.mark.parametrize("absent_on", [0, 1])
def test_a_package_that_only_one_engine_has_is_a_difference(absent_on: int) -> None:
    versions = [{"transformer-engine": "2.12.0"}, {"transformer-engine": "2.12.0"}]
    del versions[absent_on]["transformer-engine"]
    with pytest.raises(ValueError, match=r"^transformer-engine is .*missing on engine"):
        _require_equal_versions([Engine(number, "a", 1, each, 0.0) for number, each in enumerate(versions)])


def test_an_engine_with_other_code_of_the_same_version_is_refused(tmp_path: Path) -> None:
    shutil.copytree(Path(engine.__file__).parents[1], tmp_path / "memlab")
    with (tmp_path / "memlab" / "units.py").open("a") as source:
        source.write("# another line\n")
    program = "import json; from memlab.ranks.engine import describe; print(json.dumps(describe()))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    answer = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    here, other = Engine(0, **engine.describe()), Engine(1, **json.loads(answer))
    assert here.versions["memlab"] == other.versions["memlab"]
    _require_equal_versions([here, here])
    words = r"^the hash of memlab's source files is \w{12} %s and \w{12} on engine 1 \(process \d+ on .*\), must be the same"
    with pytest.raises(ValueError, match=words % r"on engine 0 \(process \d+ on .*\)"):
        _require_equal_versions([here, other])
    with pytest.raises(ValueError, match=words % "in this process"):
        _require_equal_versions([other, other])


def test_no_cluster_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"no cluster of profile 'none-such' answers .*ipcluster start --profile"):
        Ranks.connect("none-such")


def test_nothing_is_left_of_a_notebook_that_is_killed() -> None:
    code = (
        "from memlab import Ranks; import time; r = Ranks.start(1); print(r._local.folder, flush=True); time.sleep(99)"
    )
    notebook = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert notebook.stdout is not None
    folder = notebook.stdout.readline().strip()
    started = psutil.Process(notebook.pid).children(recursive=True)
    assert len(started) > 3
    # The processes that it has started go on without it.
    next(process for process in started if "ipyparallel.controller" in process.cmdline()).kill()
    notebook.kill()
    notebook.wait()
    assert psutil.wait_procs(started, timeout=20)[1] == []
    deadline = time.monotonic() + 10
    while os.path.exists(folder) and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(0.1)
    assert not os.path.exists(folder), "the connection keys are removed"  # noqa: PTH110


def test_a_lab_on_two_ranks_does_what_a_lab_on_one_does(ranks: Ranks) -> None:
    ranks.refresh()
    with Lab(**TINY, layout=Layout(pipeline_model_parallel_size=2), num_microbatches=2, ranks=ranks) as lab:
        assert lab.backend.name == "cpu"
        plain = lab.step()
        assert isinstance(plain, JobRecord)
        assert repr(lab).endswith(", 2 steps)"), "a warm-up step counts"
        full = lab.step(FULL)
        assert [record.scenario.layout.rank for record in full.ranks] == [0, 1]
        assert full.peak_allocated_bytes == max(record.peak_allocated_bytes for record in full.ranks)
        assert full.peak_allocated_bytes < plain.peak_allocated_bytes
        assert full.loss == plain.loss
        assert lab.step(MemorySettings()).ranks[1].peak_by_category == plain.ranks[1].peak_by_category
        moved = lab.offload("optimizer state")
        assert moved.transferred_bytes["optimizer state"] == sum(
            record.peak_by_category["optimizer state"] for record in plain.ranks
        )
        assert len(lab.each("audit_residency")) == 2
        with pytest.raises(
            ValueError,
            match=r"audit_residency looks into one process, and this lab has 2 ranks, each in its own: call lab",
        ):
            lab.audit_residency()
        with pytest.raises(ValueError, match=r"method is 'close', must be one of audit_offload, audit_residency, "):
            lab.each("close")
        with pytest.raises(ValueError, match="micro_batch_size is 0, must be"):
            lab.set_workload(micro_batch_size=0)
        lab.set_state(TrainingState(grad_reduce_in_bf16=True), FULL)
        assert lab.settings == FULL
        again = lab.step(MemorySettings(), state=TrainingState())
        assert [record.peak_by_category for record in again.ranks] == [
            record.peak_by_category for record in plain.ranks
        ]
        assert len(lab.state_changes) == 2
    assert lab.closed
    processes = [process_of(ranks, rank).pid for rank in range(2)]
    with Lab(**TINY, layout=Layout(data_parallel_size=2), ranks=ranks) as lab:
        assert lab.step(FULL).status == "ok"
        assert processes == [process_of(ranks, rank).pid for rank in range(2)], "the next lab finds the processes"


def test_ranks_on_several_hosts_use_the_network_that_leads_to_the_others(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.refresh()
    call, opened = RankGroup.call, []

    def noted_call(group: RankGroup, method: str, *args: Any) -> list[Any]:
        if method == "open":
            opened.extend(meeting for meeting, *_ in args[0])
        return call(group, method, *args)

    monkeypatch.setattr(RankGroup, "call", noted_call)
    monkeypatch.setattr(Ranks, "is_on_this_machine", False)
    with Lab(**TINY, layout=Layout(data_parallel_size=2), ranks=ranks) as lab:
        assert lab.step(warm_up=False).status == "ok"
    assert [meeting["MASTER_ADDR"] for meeting in opened] == [ranks.engines[0].host] * 2
    assert {meeting["GLOO_SOCKET_IFNAME"] for meeting in opened} <= psutil.net_if_addrs().keys()
    assert psutil.net_if_addrs()[Rank(print).interface_to("127.0.0.1")][0].address == "127.0.0.1"
    assert Rank(print).interface_to("no such host") == ""


def test_a_step_that_one_rank_cannot_finish_ends_on_all_and_the_job_is_built_again(ranks: Ranks) -> None:
    ranks.refresh()
    layout = Layout(pipeline_model_parallel_size=2)
    with Lab(**TINY, layout=layout, num_microbatches=2, ranks=ranks) as lab:
        assert not lab.step(warm_up=False).is_steady
        plain = lab.step(warm_up=False)
        assert [record.is_steady for record in (plain, *plain.ranks)] == [True] * 3
        lower, higher = sorted(record.peak_allocated_bytes for record in plain.ranks)
        lab.device_memory_bytes = (lower + higher) // 2
        failed = lab.step(MemorySettings())
        assert (failed.status, failed.is_steady) == ("out_of_memory", False)
        assert failed.message.startswith(f"rank {plain.worst_rank}: ")
        lab.device_memory_bytes = None
        again = lab.step()
        assert again.peak_allocated_bytes == plain.peak_allocated_bytes
        assert again.loss == plain.loss
        # Stop ends a step on both ranks together, and the model stays.
        processes = [process_of(ranks, rank).pid for rank in range(2)]
        lab.set_workload(num_microbatches=8)

        def fail(_: object) -> None:
            raise OSError("the progress bar is gone")

        num_records = len(lab.records)
        with pytest.raises(OSError, match="the progress bar is gone"):
            lab.step(FULL, on_progress=fail)
        assert (len(lab.records), lab.settings) == (num_records, FULL)
        lab.apply(MemorySettings())
        running = lab.submit()
        lab.stop()  # before the ranks have begun
        assert running.result(timeout=60).status == "interrupted"
        running = lab.submit(on_progress=lambda _: lab.stop() and None)
        assert running.result(timeout=60).status == "interrupted"
        assert [lab.step(warm_up=False).is_steady for _ in range(2)] == [False, True]
        assert processes == [process_of(ranks, rank).pid for rank in range(2)]


def test_ctrl_c_or_a_request_to_terminate_waits_for_the_pass_of_a_job_or_ends_its_processes(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.refresh()
    call, stopping = RankGroup.call, threading.Event()
    signals = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}

    def interrupted_call(group: RankGroup, method: str, *args: Any) -> list[Any]:
        if method == "take":
            threading.Timer(0.5, os.kill, (os.getpid(), signals[error])).start()
            assert stopping.wait(60)
        return call(group, method, *args)

    with Lab(**TINY, layout=Layout(data_parallel_size=2), ranks=ranks) as lab:
        lab.forward_only()
        processes = [process_of(ranks, rank) for rank in range(2)]
        for seconds, num_microbatches, error in ((60.0, 2, KeyboardInterrupt), (0.0, 16_000, SystemExit)):
            stopping.clear()
            with monkeypatch.context() as patched, terminate_on_signal():
                patched.setattr(RankGroup, "call", interrupted_call)
                patched.setattr(RankGroup, "notify", lambda *_: stopping.set())
                patched.setattr(many_ranks, "_STOP_SECONDS", seconds)
                with pytest.raises(error):
                    lab.forward_only(num_microbatches=num_microbatches)
            assert not lab.busy
            assert len(lab.records) == 2, "the short pass has ended, and the long one has no record"
        assert psutil.wait_procs(processes, timeout=10)[1] == []
        assert lab.forward_only().status == "ok", "the job is built again"


def test_a_job_of_one_rank_runs_out_of_memory_and_goes_on_after_a_build_that_failed(ranks: Ranks) -> None:
    ranks.refresh()
    with Lab(**TINY, packed_sequences=8, ranks=ranks) as lab:
        lab.pinned_host_memory = False
        lab.set_workload(seq_length=19)
        lab.device_memory_bytes = 1000
        assert lab.step().status == "out_of_memory"
        lab.device_memory_bytes = None
        process_of(ranks, 0).kill()
        with pytest.raises(RankFailed, match="rank 0 is lost"):
            lab.step()
        session = ranks_of(lab)
        session._wanted_backend = "none such"
        for _ in range(2):
            with pytest.raises(ValueError, match="none such"):
                lab.step(FULL)
            assert lab.settings == MemorySettings(), "no rank has taken the settings that came with the step"
        session._wanted_backend = "cpu"
        (again,) = lab.step().ranks
        assert (again.status, again.scenario.packed_sequences) == ("ok", 2)
        assert not lab.pinned_host_memory
        lab.set_workload(seq_length=64)
        assert [record.scenario.packed_sequences for record in lab.step().ranks] == [8], "as long as they were"


def test_the_command_names_the_rank_that_runs_out_of_memory(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks.refresh()
    monkeypatch.setattr(Ranks, "start", lambda number: nullcontext(ranks))
    step = "measure qwen3-moe-tiny --num-layers 2 --seq-length 64 --backend cpu --num-microbatches 2"
    assert main(f"{step} --ranks 2 --device-memory 6MiB".split()) == 1
    printed = capfd.readouterr().out
    assert "out of memory: rank " in printed
    assert "<- worst" in printed


def test_what_a_job_cannot_be_is_refused_before_anything_starts(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"has 4 ranks, and there are 2 engines: choose a smaller layout, or Ranks"):
        Lab(**TINY, layout=Layout(data_parallel_size=4), ranks=ranks)
    with pytest.raises(ValueError, match="backend is 'simulated', which predicts any rank in this process"):
        Lab(**TINY | {"backend": "simulated"}, layout=Layout(data_parallel_size=2), ranks=ranks)
    with pytest.raises(ValueError, match="ranks is 0, must be"):
        Ranks.start(0)


def test_a_job_whose_models_are_lost_is_closed_as_a_lab_is(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab(**TINY, layout=Layout(data_parallel_size=2), ranks=ranks) as lab:
        session = ranks_of(lab)
        group = session._group
        assert group is not None

        def lose(*_: object) -> None:
            raise ModelLost("lost on every rank: open another with Lab(...)")

        monkeypatch.setattr(session, "_on_all", lose)
        with pytest.raises(ModelLost):
            lab.set_state(TrainingState(grad_reduce_in_bf16=True))
        assert not group.alive
        with pytest.raises(ValueError, match="is closed: open another"):
            lab.step()


def test_ipyparallel_raises_what_is_caught_for_an_engine_that_has_left(ranks: Ranks) -> None:
    with pytest.raises((IndexError, ipyparallel.error.NoEnginesRegistered)):
        ranks.call(999, engine.describe)


@pytest.mark.parametrize(("queued_seconds", "has_stalled"), [(0.0, True), (0.5, False)])
def test_a_process_without_a_processor_is_not_idle(queued_seconds: float, has_stalled: bool) -> None:
    """A busy machine gives it none for long, which is not that ranks wait for each other."""
    member = group._Member(0, cast(Any, None))
    for _ in range(2):
        member.hear("alive", Whereabouts(at="f", calls=1, waits=False, cpu_seconds=0.0, queued_seconds=queued_seconds))
    assert member.has_stalled(member.moved + group.STALL_SECONDS + 1) is has_stalled


def test_the_time_without_a_processor_is_that_of_all_threads_but_the_one_that_asks(tmp_path: Path) -> None:
    for thread, line in (("1", "5 2500000000 7"), ("2", "5 9000000000 7"), ("3", "")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(line)
    assert queued_seconds(2, tmp_path) == 2.5
    assert queued_seconds(2, tmp_path / "none") == 0.0
