"""The proxies that `gateway.py` measures, each started in front of one replica: ours, and those people use today.

LiteLLM's proxy, SkyServe's load balancer and dstack's in-server proxy come from PyPI, each in an environment of its own
(`peers.py`). SkyServe's is told of the replica by a controller that answers as its own does. dstack's runs its own routes and
connection pool with the service held in memory and the replica reached directly, without its database query and ssh tunnel for
each request: what is measured is the proxying alone.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tools.bench import peers
from tools.bench.free_ports import free_port

from podway.gateway.table import Backend, RoutedService, RouteTable

MODEL = "dummy"
PROXY_CORE, OTHER_CORE = {0}, {1}
Started = tuple[int, str, str, int]  # port, path of chat completions, key, the first process


@contextlib.contextmanager
def process(command: list[str], cores: set[int], log: Path, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process on some cores, ended with everything it started."""
    with log.open("ab") as out:
        started = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            start_new_session=True,
            **more,
        )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, 9)
        started.wait()


@contextlib.contextmanager
def podway(place: Path, upstream: int) -> Iterator[Started]:
    """Our own."""
    port = free_port()
    service = RoutedService(
        name="dummy", model=MODEL, auth=False, backends=(Backend(id="0", address=f"127.0.0.1:{upstream}"),)
    )
    routes = place / "routes.json"
    routes.write_bytes(msgspec.json.encode(RouteTable(version=1, services=(service,))))
    command = [sys.executable, "-m", "podway.cli.main", "gateway", "--routes", str(routes), "--port", str(port)]
    with process(command, PROXY_CORE, place / "podway.log") as started:
        yield port, "/v1/chat/completions", "none", started.pid


@contextlib.contextmanager
def litellm(place: Path, upstream: int) -> Iterator[Started]:
    """LiteLLM's proxy with one worker."""
    bin_dir = peers.install("litellm")
    if bin_dir is None:
        raise RuntimeError("could not be installed")
    port = free_port()
    config = place / "litellm.yaml"
    config.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{MODEL}\n"
        f"      api_base: http://127.0.0.1:{upstream}/v1\n      api_key: none\n"
    )
    command = [str(bin_dir / "litellm"), "--config", str(config), "--port", str(port), "--num_workers", "1"]
    env = {"PATH": f"{bin_dir}:{os.environ['PATH']}", "HOME": str(place), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = (
        "true"  # without a check of keys, which would cost it time
    )
    with process(command, PROXY_CORE, place / "litellm.log", env=env) as started:
        yield port, "/v1/chat/completions", "sk-none", started.pid


_SKYSERVE = """
import sys, threading, json, logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from sky.serve import load_balancer
port, upstream, controller = map(int, sys.argv[1:4])
class Controller(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers.get('content-length', 0)))
        body = json.dumps({'replica_info': {f'http://127.0.0.1:{upstream}': {'gpu_type': 'TPU'}}}).encode()
        self.send_response(200); self.send_header('content-type', 'application/json')
        self.send_header('content-length', str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
threading.Thread(target=ThreadingHTTPServer(('127.0.0.1', controller), Controller).serve_forever, daemon=True).start()
load_balancer.run_load_balancer(f'http://127.0.0.1:{controller}', port, 'least_load')
"""


@contextlib.contextmanager
def skyserve(place: Path, upstream: int) -> Iterator[Started]:
    """SkyPilot's load balancer, told of the replica by a controller that answers as its own does."""
    bin_dir = peers.install("sky")
    if bin_dir is None:
        raise RuntimeError("could not be installed")
    port = free_port()
    script = place / "skyserve.py"
    script.write_text(_SKYSERVE)
    command = [str(bin_dir / "python"), str(script), str(port), str(upstream), str(free_port())]
    env = {"PATH": f"{bin_dir}:{os.environ['PATH']}", "HOME": str(place), "USER": "bench"}
    with process(command, PROXY_CORE, place / "skyserve.log", env=env) as started:
        yield port, "/v1/chat/completions", "none", started.pid


_DSTACK = """
import sys, httpx, uvicorn
from fastapi import FastAPI
from dstack._internal.proxy.lib.models import Project, Replica, Service
from dstack._internal.proxy.lib.repo import BaseProxyRepo
from dstack._internal.proxy.lib.auth import BaseProxyAuthProvider
from dstack._internal.proxy.lib.deps import ProxyDependencyInjector
from dstack._internal.proxy.lib.services.service_connection import ServiceClient
from dstack._internal.server.services.proxy.routers import service_proxy
port, upstream = map(int, sys.argv[1:3])
replica = Replica(id='r', app_port=upstream, ssh_destination='root@localhost', ssh_port=22)
service = Service(project_name='main', run_name='dummy', auth=False, client_max_body_size=1 << 30, replicas=(replica,))
class Repo(BaseProxyRepo):
    async def get_service(self, project_name, run_name): return service
    async def list_models(self, project_name): return []
    async def get_model(self, project_name, name): return None
    async def get_project(self, name): return Project(name=name, ssh_private_key='')
class Auth(BaseProxyAuthProvider):
    async def is_project_member(self, project_name, token): return True
class Direct:
    made = None
    async def client(self):
        if self.made is None:
            self.made = ServiceClient(base_url=f'http://127.0.0.1:{upstream}/', timeout=service.read_timeout)
        return self.made
class Injector(ProxyDependencyInjector):
    async def get_repo(self): yield Repo()
    async def get_auth_provider(self): yield Auth()
app = FastAPI()
app.state.proxy_dependency_injector = Injector()
app.state.proxy_dependency_injector._service_conn_pool.connections['r'] = Direct()
app.include_router(service_proxy.router, prefix='/proxy/services')
uvicorn.run(app, host='127.0.0.1', port=port, log_level='error')
"""


@contextlib.contextmanager
def dstack(place: Path, upstream: int) -> Iterator[Started]:
    """dstack's proxy inside its server."""
    bin_dir = peers.install("dstack")
    if bin_dir is None:
        raise RuntimeError("could not be installed")
    port = free_port()
    script = place / "dstack_proxy.py"
    script.write_text(_DSTACK)
    env = {"PATH": f"{bin_dir}:{os.environ['PATH']}", "HOME": str(place), "USER": "bench"}
    command = [str(bin_dir / "python"), str(script), str(port), str(upstream)]
    with process(command, PROXY_CORE, place / "dstack.log", env=env) as started:
        yield port, "/proxy/services/main/dummy/v1/chat/completions", "none", started.pid


def last_line(place: Path) -> str:
    """Of the log that was written last: why a proxy did not start."""
    logs = sorted(place.glob("*.log"), key=lambda path: path.stat().st_mtime)
    lines = logs[-1].read_text(errors="replace").strip().splitlines() if logs else []
    return lines[-1][:200] if lines else "it said nothing"
