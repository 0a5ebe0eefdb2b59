"""SIGKILL at random moments of a loop that saves: what has a name is always whole."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from retrograd.checkpoint import CheckpointStore

WRITER = """
import sys
from pathlib import Path
import numpy as np
from retrograd.checkpoint import Checkpoint, CheckpointStore

directory, first = Path(sys.argv[1]), int(sys.argv[2])
store = CheckpointStore(directory)
for step in range(first, first + 10**6):
    value = np.full(20_000, step, np.float32)
    checkpoint = Checkpoint(signature={"run": 1}, state={"step": step}, tensors={"value": value})
    write = lambda path: path.write_bytes(b"%d" % step * 1000)
    store.save(f"step-{step % 3:06d}", checkpoint, adapter=write)
    store.save("best", checkpoint, adapter=write)
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_kill_at_random_moments(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    reached = 0
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(reached + 1)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        reached = int(process.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.08))
        process.kill()
        rest = process.stdout.read().split(b"\n")[:-1]
        process.wait()
        process.stdout.close()
        reached = int(rest[-1]) if rest else reached
        store = CheckpointStore(tmp_path)
        store.recover()
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
        for path in store.paths():
            loaded = store.load(path)
            step = loaded.state["step"]
            assert (loaded.tensors["value"] == step).all()
            gguf = tmp_path / f"{path.name.removesuffix('.state')}.gguf"
            assert gguf.read_bytes() == b"%d" % step * 1000
        best = store.load(tmp_path / "best.state").state["step"]
        assert best in (reached, reached + 1)
