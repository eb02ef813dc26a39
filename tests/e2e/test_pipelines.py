"""A pipeline from its request to its end: in order, stopped by the first failure, across the death of the server, cancelled whole."""

from podway.launch_options import FollowingTask, LaunchOptions, LaunchRequest
from tests.conftest import wait_until
from tests.e2e.harness import Podway, task


def pipeline(*scripts: str) -> LaunchRequest:
    first, *then = (task(run, name=f"step-{number}") for number, run in enumerate(scripts, start=1))
    return LaunchRequest(
        task=first, then=tuple(FollowingTask(task=one) for one in then), options=LaunchOptions(cluster="c")
    )


def test_a_pipeline_runs_in_order_and_ends_with_its_first_failure(pod: Podway) -> None:
    pod.start()
    go = pod.home / "go"
    waiting = f"while [ ! -e {go} ]; do sleep 0.1; done; echo one >> ~/order"
    reply = pod.client.submit(pipeline(waiting, "echo two >> ~/order", "exit 3", "echo four >> ~/order"))
    assert (reply.job, reply.then) == (1, [2, 3, 4])
    wait_until(lambda: pod.client.job("c", 1).state == "RUNNING", 60, "the first task")
    assert [job.after for job in pod.client.jobs("c")] == [None, 1, 2, 3]
    pod.kill_server()
    go.touch()
    pod.start()
    states = [pod.finished("c", number) for number in (1, 2, 3, 4)]
    assert states == ["SUCCEEDED", "SUCCEEDED", "FAILED", "CANCELLED"]
    assert pod.client.job("c", 4).reason == "job 3, which it follows, is FAILED"
    orders = {path.read_text() for path in pod.home.glob("local/c/host-*/order")}
    assert orders == {"one\ntwo\n"}

    again = pod.client.submit(pipeline("sleep 1000", "touch ~/never", "touch ~/never"))
    assert (again.job, again.then) == (5, [6, 7])
    wait_until(lambda: pod.client.job("c", 5).state == "RUNNING", 60, "the second pipeline")
    assert pod.client.cancel("c", (5,)) == [5, 6, 7]
    assert [pod.finished("c", number) for number in (5, 6, 7)] == ["CANCELLED"] * 3
    assert not list(pod.home.glob("local/c/host-*/never"))
    pod.down("c")
