"""Engine processes of a run: started, watched, and restarted on the same URL when one ends or hangs.

    starting --answers--> running --ended, or silent for hang_timeout_s--> killed --delay--> starting
       \\--ended, or silent for startup_timeout_s--> killed                    \\--no restart left--> given up

The trainer knows an engine only by its URL and never talks to the supervisor. It fences an engine that fails, and takes
it back once it is healthy and holds weights that were pushed and verified (engines/pool.py). A restarted engine holds
the run's initial checkpoint as version "default", which no push ever has.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bapo_megatron.engines import processes
from bapo_megatron.errors import UserError
from bapo_megatron.runtime.turn import Turn

_POLL_S = 0.2
_PROBE_INTERVAL_S = 5.0
_PROBE_TIMEOUT_S = 5.0
FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 30.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The command that starts one engine, any number of times. Each restart writes its own log next to `log`.

    Example: EngineSpec("http://127.0.0.1:30000", ["python", "-m", "engine", "--port", "30000"], Path("engine-0.log"))
    """

    url: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    key: str | None = field(default=None, repr=False)
    """The key that the engine asks its clients for; it finds it with `take_key`."""


@contextlib.contextmanager
def supervised(
    specs: Sequence[EngineSpec],
    *,
    startup_timeout_s: float,
    max_restarts: int = 0,
    hang_timeout_s: float = math.inf,
    turn_file: Path | None = None,
    tell: Tell = lambda text: print(text, file=sys.stderr),
) -> Iterator[StartedEngines]:
    """Start engines and yield them immediately; supervise them once all are healthy, and end them with the block.

    Args:
        startup_timeout_s: how long each start may take.
        max_restarts: how often each engine is started again.
        hang_timeout_s: an engine that has not answered for this long is killed and started again.
        turn_file: engines are started again only while the trainer is not on their GPUs (runtime/turn.py).
        tell: gets one line for each restart and each engine given up; called from the supervisor's threads.

    Raises:
        UserError: raised by the block; the engines that are down are added to it.
    """
    ended = threading.Event()

    def described(spec: EngineSpec) -> _Engine:
        turn = None if turn_file is None else Turn(turn_file)
        return _Engine(spec, startup_timeout_s, max_restarts, hang_timeout_s, turn, tell, ended)

    engines = [described(spec) for spec in specs]
    running: list[_Engine] = []
    started = StartedEngines([spec.url for spec in specs], engines)
    try:
        for engine in engines:
            engine.start()
            running.append(engine)
        with started.naming_the_dead():
            yield started
    finally:
        ended.set()
        for thread in started.threads:
            thread.join()  # lasts one probe at most
        processes.end([engine.process for engine in running])


class StartedEngines:
    """Engines whose processes have been started, and which may not answer yet. Without processes: the user's own.

    Args:
        urls: the URLs of all engines, in order.
    """

    def __init__(self, urls: list[str], engines: Sequence[_Engine] = ()) -> None:
        self.urls = urls
        self.threads: list[threading.Thread] = []  # each watches one engine, once all are healthy
        self._engines = engines
        self._num_healthy = 0
        self._began_s = time.monotonic()

    def urls_left(self) -> list[str]:
        """Return the URLs of the engines that are not given up."""
        given_up = {engine.spec.url for engine in self._engines if engine.is_given_up}
        return [url for url in self.urls if url not in given_up]

    def are_healthy(self) -> bool:
        """Return whether every engine has answered; from then on they are supervised.

        Raises:
            UserError: an engine refused its arguments, or samples without the key.
            EngineError: an engine ended, or was not healthy in time.
        """
        for engine in self._engines[self._num_healthy :]:
            if not processes.answers(f"{engine.spec.url}/health", key=engine.spec.key):
                processes.check_start(engine.process, engine.log, self._began_s, engine.startup_timeout_s)
                return False
            if engine.spec.key is not None and not processes.asks_for_a_key(engine.spec.url):
                raise UserError(
                    f"{engine}: it samples without the run's key; make it answer 401 unless a request has the header "
                    "`Authorization: Bearer KEY`, with the key that bapo_megatron.engines.key.take_key returns"
                )
            self._num_healthy += 1
        if not self.threads:
            self.threads = [threading.Thread(target=e.look_after, name=e.name, daemon=True) for e in self._engines]
            for thread in self.threads:
                thread.start()
        return True

    def all_answer(self) -> bool:
        """Return whether every engine that is not given up answers now: none is being restarted."""
        left = [engine for engine in self._engines if not engine.is_given_up]
        return all(processes.answers(f"{one.spec.url}/server_info", _PROBE_TIMEOUT_S, one.spec.key) for one in left)

    def wait(self) -> None:
        """Return once all are healthy. Raises UserError, EngineError: see `are_healthy`."""
        while not self.are_healthy():
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def naming_the_dead(self) -> Iterator[None]:
        """Add the engines that are down, and their logs, to a UserError of the body, unless it is about their start."""
        try:
            yield
        except UserError as error:
            notes = [note for engine in self._engines if (note := engine.describe())] if self.threads else []
            raise UserError("\n".join([str(error), *notes])) from error


@dataclass
class _Engine:
    """One engine and its restarts. `look_after` runs in its own thread."""

    spec: EngineSpec
    startup_timeout_s: float
    max_restarts: int
    hang_timeout_s: float
    turn: Turn | None  # held from a restart until the engine answers or is gone
    tell: Tell
    run_ended: threading.Event
    process: subprocess.Popen[bytes] = field(init=False)
    problem: str | None = field(default=None, init=False)  # set when noticed, cleared when the engine answers again
    is_given_up: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.name = self.spec.log.stem
        self.log = self.spec.log

    def start(self) -> None:
        self.process = processes.start(self.spec.command, self.log, self.spec.environment, self.spec.key)

    def look_after(self) -> None:
        """Restart it when needed, until the run ends or no restart is left."""
        for attempt in range(1, self.max_restarts + 1):
            if not self._wait_for_a_problem():
                return
            old_log, self.log = self.log, self.spec.log.with_name(f"{self.name}.restart-{attempt}.log")
            restart = f"restart {attempt} of {self.max_restarts}, log: {self.log}"
            self.tell(f"{self} {self.problem} (its log: {old_log}); {restart}")
            if self.run_ended.wait(min(FIRST_DELAY_S * 2 ** (attempt - 1), _MAX_DELAY_S)):
                return
            try:
                if self.turn is not None and not self.turn.take(shared=True, is_over=self.run_ended.is_set):
                    return
                self.start()
            except (OSError, UserError) as problem:  # no memory, file or process left: the next attempt may succeed
                self.tell(f"{self} could not be started: {problem}")
        if self._wait_for_a_problem():
            self.is_given_up = True
            self.tell(f"{self} {self.problem} (its log: {self.log}); no restart is left, the run continues without it")

    def _wait_for_a_problem(self) -> bool:
        """Return True once there is a `problem` and the process is gone, or False at the end of the run."""
        try:
            return self._watch()
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        if self.turn is not None:
            self.turn.give()

    def _watch(self) -> bool:
        # This asks the scheduler. Unlike SGLang's /health, it is answered while generation is paused.
        probe = f"{self.spec.url}/server_info"
        limit_s, name = self.startup_timeout_s, "rollout.startup_timeout_s"
        answered_at = time.monotonic()
        probe_at = answered_at
        while not self.run_ended.wait(_POLL_S):
            if processes.has_ended(self.process):
                processes.kill(self.process)  # its children, if any are left
                self.problem = f"ended with exit code {self.process.returncode}"
                return True
            if time.monotonic() < probe_at:
                continue
            if processes.answers(probe, min(_PROBE_TIMEOUT_S, self.hang_timeout_s), self.spec.key):
                limit_s, name = self.hang_timeout_s, "rollout.hang_timeout_s"
                answered_at = time.monotonic()
                self.problem = None
                self._end_turn()
            elif time.monotonic() - answered_at > limit_s:
                processes.ask_for_stacks(self.process)
                processes.kill(self.process)
                self.problem = f"did not answer for {name} = {limit_s:g} s, was asked for its stacks and killed"
                return True
            trainer_waits = self.turn is not None and self.turn.is_held
            probe_at = time.monotonic() + (0.0 if trainer_waits else min(_PROBE_INTERVAL_S, limit_s / 4))
        return False

    def describe(self) -> str | None:
        """Describe its problem, if any, even one not noticed yet."""
        if self.problem is None and not processes.has_ended(self.process):
            return None
        return f"{self} {self.problem or 'has ended'}; its log: {self.log}"

    def __str__(self) -> str:
        return f"rollout {self.name} ({self.spec.url})"
