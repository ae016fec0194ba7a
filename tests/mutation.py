"""`python -m tests.mutation`: plant known faults, one at a time, and show that the tests catch every one."""

import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parent.parent
# The simulator first: it finds most. Tests of whole servers are left out, they would only find the same later.
TESTS = ("tests/simulation", "tests/state", "tests/store", "tests/engine", "tests/models/test_oracle.py")


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `old` (which stands there once) becomes `new`."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "a lease does not protect rows", "state/node.py",
        "return self.leases == 0 and self.device_children == 0 and self.slots is not None",
        "return self.device_children == 0 and self.slots is not None",
    ),
    Mutant(
        "rows go before the rows that follow them", "state/node.py",
        "return self.leases == 0 and self.device_children == 0 and self.slots is not None",
        "return self.leases == 0 and self.slots is not None",
    ),
    Mutant("a save takes no lease", "engine/exchange.py", "        self.tree.lease(job.node)\n", ""),
    Mutant(
        "a snapshot under a lease is dropped", "state/eviction.py",
        "lambda node: node.superseded and not node.snapshot_leases", "lambda node: node.superseded",
    ),
    Mutant(
        "thinning drops a snapshot that is being saved", "state/tree.py",
        "if each.end in drop and not under_way:", "if each.end in drop:",
    ),
    Mutant("a slot is given out twice", "state/pool.py", "        self._num_free = first\n", "        self._num_free = first + (first > 9)\n"),
    Mutant(
        "rows that are known already leak their slots", "state/tree.py",
        "                self.pool.free_rows(slots[position : position + length])", "                pass",
    ),
    Mutant("a split hands a slot to both halves", "state/tree.py", "node.slots = node.slots[length:]", "node.slots = node.slots[length - 1 : -1]"),
    Mutant("a released leaf is not queued for eviction", "state/tree.py", "                    self._order.add_rows(each)\n", "                    pass\n"),
    Mutant(
        "a sequence resumes one token late", "engine/holdings.py",
        "sequence.node, sequence.shared, sequence.position = node, position, position",
        "sequence.node, sequence.shared, sequence.position = node, position, position + (0 < position < length)",
    ),
    Mutant("a live state is not cleared", "engine/holdings.py", "            pool.clear_live(live_row)\n", "            pass\n"),
    Mutant(
        "the convolution tail is not saved", "state/pool.py",
        "        np.copyto(place.numpy(), rows.numpy())\n",
        "        np.copyto(place.numpy(), rows.numpy())\n"
        "        for part in self.layout.snapshot_fields:\n"
        "            if part.spec.name.endswith('conv'):\n"
        "                place[part.start : part.start + part.spec.nbytes] = 0\n",
    ),
    Mutant(
        "the last hidden vector is not loaded", "state/pool.py",
        "            self.live.numpy()[live_row, first:last] = snapshot.numpy()",
        "            self.live.numpy()[live_row, first : last - 32] = snapshot.numpy()[:-32]",
    ),
    Mutant("rows are loaded in the wrong order", "store/queues.py", "write(part.slots[begin - offset : end - offset], segment.rows[begin:end])", "write(part.slots[begin - offset : end - offset][::-1], segment.rows[begin:end])"),
    Mutant("a load that failed counts as done", "store/queues.py", "                    result.ok = False\n                    break", "                    break"),
    Mutant(
        "a hit is counted at lookup", "engine/engine.py",
        "        if sequence.status is Status.RUNNING:\n            self._count_reused",
        "        if True:\n            self._count_reused",
    ),
    Mutant("the salt is ignored", "state/address.py", 'fingerprint.encode() + b"\\0" + salt.encode()', 'fingerprint.encode() + b"\\0"'),
    Mutant("an address does not cover its last tokens", "state/address.py", "material = self._chain[strides] + rest.tobytes()", "material = self._chain[strides] + rest[:-1].tobytes()"),
    Mutant("everything is saved again at every turn", "store/planning.py", "if each.rows is None and each.slots is not None:", "if each.slots is not None:"),
    Mutant("what is being saved is saved by another too", "state/saved.py", "        if saved.tiers or saved.pending or saved.unreachable:\n", "        if saved.tiers or saved.unreachable:\n"),
    Mutant("a tier evicts what is being read", "store/ledger.py", "elif not entry.complete or entry.leases or entry.dropping:", "elif not entry.complete or entry.dropping:"),
    Mutant("a tier passes its budget", "store/ledger.py", "lacking = self._usage.take(nbytes, self.budget_bytes)", "lacking = self._usage.take(nbytes, self.budget_bytes + 500)"),
    Mutant("a process of several takes more than the budget", "store/usage.py", "            lacking = max(0, total.nbytes + nbytes - budget_bytes)\n            total.nbytes", "            lacking = max(0, nbytes - budget_bytes)\n            total.nbytes"),
    Mutant("two that remove one file both give its bytes back", "store/place.py", "            return 0\n        nbytes = staged", "            return None\n        nbytes = staged"),
    Mutant("half-written files are never removed", "store/objects.py", "                self.place.remove_staged()\n", "                pass\n"),
    Mutant("chunks of an encrypted object can change places", "store/encryption.py", 'return chunk.to_bytes(11, "big") + bytes([last])', 'return bytes(11) + bytes([last])'),
    Mutant("an imported session is not cut anew", "store/transfer.py", "        if there == wanted:\n", "        if True:\n"),
    Mutant("a checksum that does not hold is let pass", "state/segment.py", "if digest.hexdigest() != self.checksum:", "if False:"),
    Mutant("a segment under another's name is let pass", "state/segment.py", "    if header.name != name:\n", "    if False:\n"),
    Mutant("another model's segment is let pass", "state/segment.py", "    if header.fingerprint != fingerprint:\n", "    if False:\n"),
    Mutant("what a tier has lost is not forgotten", "state/saved.py", "        saved.tiers.discard(tier)\n        saved.unreachable.discard(tier)\n", ""),
    Mutant("a tier that lost a segment never keeps it again", "store/queues.py", "            if reachable:  #", "            if damage is not None:  #"),
    Mutant("two that need the same prefix both compute it", "engine/scheduler.py", "            if self._wait_for_leader(sequence, match):\n", "            if False:\n"),
    Mutant("no snapshot is kept at a branch point", "state/policy.py", "position for position in (known, *boundaries)", "position for position in boundaries"),
    Mutant("slots of a load under way are given to others", "engine/engine.py", "            if sequence.status is not Status.LOADING:  # a load", "            if True:  # a load"),
    Mutant("a preempted response loses its newest token", "engine/holdings.py", "first, last = sequence.shared, sequence.position\n", "first, last = sequence.shared, sequence.position - (sequence.position > sequence.prompt_end)\n"),
    Mutant("a snapshot is found at another position", "store/finding.py", "            snapshot = self._look(Kind.SNAPSHOT, end, self._link(end))\n", "            snapshot = self._look(Kind.SNAPSHOT, end - 1, self._link(end)) if end > 1 else None\n"),
    Mutant("a position without its window rows is gone on from", "state/tree.py", "window_from <= first_row(position))", "True)"),
    Mutant("a window row is given to another one token early", "engine/holdings.py", "        start = self.tree.layout.window_first(sequence.position)\n", "        start = self.tree.layout.window_first(sequence.position) + 1\n"),
    Mutant("a split shifts the window rows by one token", "state/tree.py", "in_upper = position - node.window_start", "in_upper = position - node.window_start - (node.window is not None)"),
    Mutant("window rows under a lease are freed", "state/tree.py", "or each.leases > leases:", "or False:"),
    Mutant("only half a window is loaded", "state/node.py", "        first, start = max(first, self.start), self.window_start\n", "        first, start = max(first, self.start, self.end - 9), self.window_start\n"),
    Mutant("window rows are put into the wrong page", "state/pool.py", "self._write(slots[:, index], rows[:, page.start", "self._write(slots[:, -1 - index], rows[:, page.start"),
    Mutant("what a branch needs of a window is thrown away", "state/node.py", "if node.snapshot_available or len(node.children) > 1:", "if node.snapshot_available:"),
    Mutant("a window is saved again with every branch", "store/planning.py", "_uncovered(max(live, each.window_start), each.end, each.windows_saved)", "_uncovered(max(live, each.window_start), each.end, each.windows_saved[:0])"),
    Mutant("windows are saved from where they happen to begin", "state/layout.py", "max(0, position - self.window) // self.window_block * self.window_block", "max(0, position - self.window)"),
    Mutant("window segments of one block go on from nothing", "store/planning.py", "        parent = before\n", "        pass\n"),
    Mutant("a window segment holds rows of two blocks", "store/planning.py", "            for start in range(first - first % block, last, block):\n                jobs += _window_job(tree, each, context, max(first, start), min(last, start + block))\n", "            jobs += _window_job(tree, each, context, first, last)\n"),
    Mutant("what came to a tier before its parent is left out", "engine/exchange.py", "MOST_AGAIN = 3", "MOST_AGAIN = 0"),
    Mutant("what a waiting request needs stays where it is", "engine/engine.py", "            if not sequence.promoted:", "            if False:"),
    Mutant("a pruned prefix leaves its windows in the tiers", "state/saved.py", "            self._forgotten.append(saved)\n", "            pass\n"),
    Mutant("the windows of what is found are forgotten", "state/tree.py", "            self.saved.register(saved, path)\n", "            self.saved.register(saved, path[:-1])\n"),
    Mutant("what another engine cut elsewhere is taken for one's own", "store/queues.py", "elif (other.header, other.tokens.tobytes()) != (header, job.own_tokens.tobytes()):", "elif False:"),
    Mutant("rows of another's tokens are loaded", "store/queues.py", "                segment.seal.check()\n                raise OtherSegment\n        write =", "                segment.seal.check()\n        write ="),
    Mutant("token ids that were found are not checked", "store/finding.py", "if len(whole) != header.end or chain.address(header.end) != header.tip:", "if False:"),
    Mutant("what goes on from an evicted segment is kept", "store/objects.py", "if not self._ledger.lease(parent, link.parent_tip):", "if self._ledger.lease(parent, link.parent_tip) is None:"),
    Mutant("rows go before what goes on from them", "store/ledger.py", "if digits is not None and self._children[digits] > gone[digits]:", "if False:"),
    Mutant("the last token of a prompt is not fed where its hidden vector is unknown", "state/tree.py", "ends_here = resume_node.end == resume and known", "ends_here = resume_node.end == resume"),
    Mutant("what waits to be saved can be evicted", "engine/deferred.py", "        tree.lease(node)\n        if with_snapshot:\n            tree.lease_snapshot(node)\n", "        with_snapshot = False\n        tree.lease(tree.root(node.space))\n"),
    Mutant("a turn that another goes on from is held for ever", "engine/deferred.py", "            if (before := self._held.get(each)) is not None:", "            if False and (before := self._held.get(each)):"),
    Mutant("nobody asks for the room of what waits to be saved", "engine/engine.py", "        self.exchange.save_due(room_wanted)", "        self.exchange.save_due(False)"),
    Mutant("windows cut with other rows are taken for one chain", "state/segment.py", "zip(tip, rows_tip, strict=True)) if rows_tip else tip", "zip(tip, rows_tip, strict=True)) if not tip else tip"),
    Mutant("what another engine computes is computed here too", "engine/exchange.py", "        if not done.elsewhere:\n            return None\n", "        return None\n"),
    Mutant("a note of what is computed is left for ever", "engine/engine.py", "            self.exchange.unclaim(sequence.claimed)\n", ""),
    Mutant("peers need not know the secret", "store/peer_server.py", "        return key == self._key", "        return True"),
    Mutant("what another engine has half saved is not waited for", "store/claims.py", "for name in reach.new_rows[:1]}", "for name in reach.new_rows[:0]}"),
    Mutant("notes of others are forgotten", "store/claims.py", "for each in (*maybe, *self._others)", "for each in maybe"),
    Mutant("nobody looks again after leaving a note", "store/queues.py", "if result.claimed is not None:  # another may", "if False:  # another may"),
    Mutant("rows are not cut at snapshots", "store/planning.py", "cut = not tree.layout.resumes_anywhere", "cut = False"),
    Mutant("window rows are known under two names", "state/saved.py", "        for each in overlapping:\n            self.drop(each)\n", "        for each in ():\n            self.drop(each)\n"),
    Mutant("what others computed meanwhile does not count as reused", "engine/engine.py", "        first, last = sequence.counted, min(sequence.position, sequence.prompt_end)\n        if last <= first:", "        first, last = sequence.counted, min(sequence.position, sequence.prompt_end)\n        if first or last <= first:"),
    Mutant("what is only saved counts as on the device", "state/tree.py", "whole = whole and (child.slots is not None if on_device else child.rows_available)", "whole = whole and child.rows_available"),
]  # fmt: skip


def run(mutant: Mutant | None) -> tuple[bool, str, float]:
    """Run the tests with the fault planted: (whether a test failed, its name, seconds). None plants nothing."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="holdover-mutant-") as temporary:
        folder = Path(temporary)
        for part in ("holdover", "tests", "docs"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if mutant is not None:
            path = folder / "holdover" / mutant.file
            text = path.read_text()
            if text.count(mutant.old) != 1:
                raise SystemExit(f"{mutant.name}: its place in {mutant.file} is found {text.count(mutant.old)} times")
            path.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *TESTS]
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1, failed[0] if failed else done.stdout[-300:], time.monotonic() - started


def main(
    only: Annotated[str, typer.Option(help="Only mutants whose name contains this.")] = "",
    processes: Annotated[int, typer.Option(help="Run as many at once.")] = os.cpu_count() or 1,
    minutes: Annotated[
        float | None, typer.Option(help="Begin none after so long; which come first is left to chance.")
    ] = None,
) -> None:
    """Exits with 1 if a mutant survives, or if the tests fail with no fault planted."""
    chosen = [mutant for mutant in MUTANTS if only in mutant.name]
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    if minutes is not None:
        random.shuffle(chosen)
    if not chosen:
        typer.echo(f"--only {only!r}: no mutant is called so.", err=True)
        raise typer.Exit(2)
    survivors = count = 0
    with ThreadPoolExecutor(processes) as pool:
        untouched = pool.submit(run, None)
        results = pool.map(lambda mutant: run(mutant) if time.monotonic() < deadline else None, chosen)
        for mutant, result in zip(chosen, results, strict=True):
            if result is None:
                continue
            caught, by, seconds = result
            count += 1
            survivors += not caught
            print(f"{'caught  ' if caught else 'SURVIVED'} {seconds:5.0f} s  {mutant.name}: {by[:150]}", flush=True)
        broken, by, seconds = untouched.result()
    print(f"no fault planted: {by if broken else 'the tests pass'} ({seconds:.0f} s)")
    left = f"; {len(chosen) - count} not run, for want of time" if count < len(chosen) else ""
    print(f"{count - survivors} of {count} caught{left}")
    raise typer.Exit(int(broken or survivors > 0))


if __name__ == "__main__":
    typer.run(main)
