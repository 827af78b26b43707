"""F8: a worker that reads pictures dies or hangs; the picture is named."""

import pytest


@pytest.mark.parametrize("action", ["kill", "segv"])
@pytest.mark.parametrize("processes", [1, 2])
def test_f8_a_worker_that_dies_ends_all_and_its_picture_is_named(kit, action, processes):
    out = f"worker_{action}_{processes}"
    fault = {"place": "read", "name": "b/071.png", "action": action}
    faults = [fault | {"rank": rank} for rank in range(processes)]
    ended = kit.run(out, "--train.workers=2", processes=processes, faults=faults)
    assert ended.code == 1 and ended.seconds < 90
    signal = {"kill": "Killed", "segv": "Segmentation fault"}[action]
    told = next(line for line in ended.errors.splitlines() if "pretrain_mpp: train.workers: DataLoader worker" in line)
    assert "it was at 'b/071.png'" in told, ended.text[-3000:]
    assert signal in told or "exited unexpectedly" in told  # whichever torch notices first


def test_f8b_a_worker_that_hangs_is_given_up_and_its_picture_is_named(kit, twin):
    fault = {"place": "read", "name": "b/071.png", "action": "hang"}
    ended = kit.run("worker_hangs", "--train.workers=2", "--train.data_timeout=4", faults=[fault])
    assert ended.code == 1 and "timed out after 4 seconds" in ended.errors and "'b/071.png'" in ended.errors
    kit.finish("worker_hangs", "--train.workers=2")
    kit.assert_twins("worker_hangs", twin)
