"""`launch_elastic`: the launcher's part of an elastic run: one generation of ranks after another. No torch."""

import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack

from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.errors import PipeloomError
from pipeloom.processes import launcher
from pipeloom.processes.elastic.generation import End, Generation
from pipeloom.processes.preemption import GROW, Request
from pipeloom.processes.recovery.recoveries import Rerouting, Tether
from pipeloom.train.config.schedule import process_names
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.elastic.layouts import fit
from pipeloom.train.elastic.options import CONFIGURED
from pipeloom.train.elastic.rerouting import keeps_stages, rerouted, survivors
from pipeloom.train.elastic.source import Source, lends, newest


def launch_elastic(config: TrainConfig, words: Sequence[str], variable: str) -> int:
    """Run a configuration with pipeloom's launcher, with fewer ranks after a loss and with more again.

    Args:
        config: as given; `validate` has passed for its layout.
        words: arguments of the Python interpreter.
        variable: in which the ranks read their configuration.

    Returns:
        As `launcher.launch`.
    """
    with ExitStack() as stack:
        run = _ElasticRun(config, stack)
        while True:
            code = run.generation(words, variable)
            if code is not None:
                return code


class _ElasticRun:
    def __init__(self, config: TrainConfig, stack: ExitStack) -> None:
        self._config, self._key = config, CheckpointKey.read(config.checkpoint_key_file)
        self._slots = list(range(config.max_ranks or config.num_processes))
        self._layout = fit(config, len(self._slots), exact=False)
        self._most = self._layout.config.num_processes
        self._usable = list(self._slots)
        self._source, self._begun = Source(), 0
        self._num_growths, self._grown, self._first = 0, False, 0
        self._request = Request(config.preempt_seconds)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, GROW):
            if signal.getsignal(number) != signal.SIG_IGN:
                handler = signal.signal(number, lambda number, _: self._request.signals.append(number))
                stack.callback(signal.signal, number, handler)
        stack.callback(lambda: _close(self._source.tethers))

    def generation(self, words: Sequence[str], variable: str) -> int | None:
        """Run ranks until they end; the exit code of the run, or None: other ranks go on."""
        config = self._source.configured(self._layout.config)
        slots = self._usable[: config.num_processes]
        wait = self._config.regrow_seconds * 2**self._num_growths
        ranks = Generation(
            slots,
            num_more=self._most - len(slots),
            grow_seconds=wait if self._config.regrow_seconds else None,
            grown=self._grown,
            before=self._source.tethers,
            variables=self._source.variables(self._begun),
            first=self._first,
            lends=lends(config),
            survives=self._survives,
            copied=self._copied,
            reroute=self._reroute,
        )
        variables = {variable: config.to_json()}
        if self._layout.config != self._config:
            variables[CONFIGURED] = self._config.to_json()
        code = launcher.launch(
            process_names(config),
            words,
            variables,
            request=self._request,
            recoveries=config.max_recoveries if config.recover else 0,
            elastic=ranks,
            forks=True,
        )
        if ranks.end is None:
            ranks.tethers.close()
            return code
        self._next(ranks, ranks.end)
        return None

    def _copied(self) -> None:
        """All ranks have copies of their own: those from which they began are no longer needed."""
        _close(self._source.tethers)
        self._source = Source()

    def _survives(self, num_lost: int) -> bool:
        try:
            fit(self._config, len(self._usable) - num_lost, exact=False)
        except PipeloomError:
            return False
        return True

    def _reroute(self, lost: Collection[int]) -> Rerouting | None:
        """How the ranks go on in their processes without some of them, where each keeps its stage."""
        before = self._layout.config
        found = rerouted(before, lost) if len(self._usable) - len(lost) < self._most else None
        if found is None or not keeps_stages(before):
            return None
        order = tuple(rank for _, rank in survivors(before, lost))
        self._layout = found
        self._usable = [*(self._usable[rank] for rank in order), *self._usable[before.num_processes :]]
        configuration = self._source.configured(found.config).to_json()
        words = f"the other ranks go on with {found.words}"
        return Rerouting(order, tuple(process_names(found.config)), words, configuration)

    def _next(self, ranks: Generation, end: End) -> None:
        """Choose the slots and the state of the next generation, and tell of them."""
        before, self._first, slots = self._source, ranks.first, ranks.slots
        self._source, notices = newest(before, ranks, self._source.configured(self._layout.config), self._key)
        _close({*before.tethers, *ranks.tethers.by_rank} - {*self._source.tethers})
        if end.grows:
            self._usable = list(self._slots)
            self._num_growths += 1
            why = "lost ranks start again"
        else:
            lost = {slots[rank] for rank in end.lost}
            self._usable = [slot for slot in self._usable if slot not in lost]
            why = end.text
        self._grown, self._begun = end.grows, end.begun or self._begun  # none began where ranks died as they started
        before_layout, self._layout = self._layout, fit(self._config, len(self._usable), exact=False)
        if end.lost and self._layout.config.num_processes < self._most:
            self._layout = rerouted(before_layout.config, end.lost) or self._layout
        words = self._layout.words
        for line in [*notices, f"{why}; the run goes on from {self._source.words} with {words}"]:
            sys.stderr.write(f"pipeloom: warning: {line}\n")
        sys.stderr.flush()


def _close(tethers: Collection[Tether]) -> None:
    for tether in tethers:
        tether.close()
