"""What can be checked of the container without a container engine: we had none (docs/deployment.md says so)."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from server.metrics.prometheus import Metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
PROMETHEUS = yaml.safe_load((CONFIGS / "monitoring/prometheus.yml").read_text())


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments) of the Dockerfile, continued lines joined, comments dropped."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def arguments_of(name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == name]


def test_copied_paths_exist_and_reach_the_engine():
    """A COPY of a file that was moved, or one that .dockerignore keeps out."""
    kept = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    sources = [source for copy in arguments_of("COPY") if "--from" not in copy for source in shlex.split(copy)[:-1]]
    assert {"paging", "kernels", "server", "configs"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in kept, f"{source} is in .dockerignore's dark"


def test_the_package_metadata_is_complete_in_the_image():
    """pip builds the package in the image without the readme or the license that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = " ".join(arguments_of("COPY"))
    assert project["readme"] in copied
    assert "LICENSE" in copied


def test_it_runs_as_nobody_special_on_pinned_images():
    """Root in production, or an image that changes under our feet."""
    assert arguments_of("USER")[-1] not in {"root", "0"}
    images = [line.split()[0] for line in arguments_of("FROM")]
    images += [service["image"] for service in COMPOSE["services"].values() if "image" in service]
    assert all(":" in image and not image.endswith(":latest") for image in images)


def test_apt_leaves_nothing_behind():
    """Package lists and recommended packages make the image grow by a third."""
    for run in arguments_of("RUN"):
        if "apt-get install" in run:
            assert "--no-install-recommends" in run
            assert "rm -rf /var/lib/apt/lists" in run


def test_every_shell_step_parses():
    """A quote lost in a RUN line: found by whoever builds the image next."""
    for run in arguments_of("RUN"):
        check = subprocess.run(["sh", "-n", "-c", run], capture_output=True, text=True, timeout=30)
        assert check.returncode == 0, f"{run}\n{check.stderr}"


def test_the_entry_point_understands_its_command():
    """The image's default command, or the compose file's, holds a flag that the server doesn't know."""
    entry = json.loads(arguments_of("ENTRYPOINT")[-1])
    assert entry == ["pageturner"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert entry[0] in scripts
    for command in (json.loads(arguments_of("CMD")[-1]), COMPOSE["services"]["pageturner"]["command"]):
        local = [part.replace("/etc/pageturner", str(CONFIGS)) for part in command]
        assert all(Path(part).exists() for part in local if part.startswith("/"))
        run = subprocess.run(
            [sys.executable, "-m", "server.cli", *local, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 0, run.stderr
        flags = [part for part in local if part.startswith("--")]
        assert all(flag in run.stdout for flag in flags)


def test_the_health_check_asks_a_probe():
    """A health check of a path that wants a key, or that does not exist: the container is restarted for ever."""
    [health] = arguments_of("HEALTHCHECK")
    command = json.loads(health[health.index("CMD") + 3 :])
    assert command[0] == "python"
    compile(command[2], "healthcheck", "exec")
    port, path = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", command[2]).groups()
    assert path in {"/livez", "/readyz"}
    assert port in arguments_of("EXPOSE")[-1].split()
    assert port in json.loads(arguments_of("CMD")[-1])


def test_prometheus_scrapes_where_the_server_listens():
    """Ports or paths of compose, Prometheus and the server drift apart; the dashboard stays empty."""
    [job] = PROMETHEUS["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    command = COMPOSE["services"][host]["command"]
    assert command[command.index("--port") + 1] == port
    assert any(mapping.endswith(f":{port}") for mapping in COMPOSE["services"][host]["ports"])
    assert job["metrics_path"] == "/metrics"
    source = yaml.safe_load((CONFIGS / "monitoring/grafana-provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


def test_compose_mounts_what_exists_and_publishes_to_this_machine_only():
    """A bind mount of a missing file becomes an empty folder; a published port opens the server to the world."""
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists(), volume
        assert all(mapping.startswith("127.0.0.1:") for mapping in service.get("ports", []))


@pytest.mark.skipif(shutil.which("docker") is None, reason="the docker client is not installed")
def test_compose_is_valid_for_its_own_tool():
    """A key in the wrong place, which YAML allows and compose refuses."""
    run = subprocess.run(
        ["docker", "compose", "config", "--quiet"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if "is not a docker command" in run.stderr or "unknown" in run.stderr:
        pytest.skip("this docker client has no compose")
    assert run.returncode == 0, run.stderr


def test_the_dashboard_shows_series_that_exist():
    """A renamed metric leaves an empty panel, which looks like a quiet server."""
    exposed = Metrics(model_name="m").render().decode()
    series = set(re.findall(r"^([\w:]+)(?:\{|\s)", exposed, flags=re.MULTILINE))
    dashboard = json.loads((CONFIGS / "monitoring/dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"pageturner:\w+", query)}
    assert len(asked) > 10
    assert asked <= series, sorted(asked - series)
