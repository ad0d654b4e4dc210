"""A headless Chromium, driven over the WebDriver protocol with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "needs chromium and chromedriver (Debian: chromium, chromium-driver)"

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
]


class Browser:
    """One window."""

    def __init__(self, address: str) -> None:
        self.address = address

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error

    def open(self, path: Path) -> None:
        self.call("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        """Run `script` in the page; what it returns comes back."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def find(self, selector: str) -> str:
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        return str(next(iter(found.values())))

    def click(self, selector: str) -> None:
        """A click as a person does it: it fails where something lies on top of the element."""
        self.call("POST", f"/element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self.call("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def text(self, selector: str) -> str:
        return str(self.call("GET", f"/element/{self.find(selector)}/text"))

    def emulate(self, width: int, height: int, dark: bool = False) -> None:
        """The size of the window, as small as a phone's too, and the colours asked for."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", features=scheme)

    def command(self, name: str, **params: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": name, "params": params})

    def screenshot(self, path: Path, whole: bool = False) -> None:
        data = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser() -> Iterator[Browser]:
    """A fresh Chromium with an empty profile; it and its driver are gone afterwards."""
    assert CHROMIUM
    assert DRIVER
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = f"http://127.0.0.1:{port}/session"
    with tempfile.TemporaryDirectory() as profile:
        driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
            begun = _patiently(lambda: Browser(root).call("POST", "", wanted))
            window = Browser(f"{root}/{begun['sessionId']}")
            try:
                yield window
            finally:
                window.call("DELETE", "")
        finally:
            driver.terminate()
            driver.wait(timeout=20)


def _patiently(begin: Any) -> Any:
    """Try again until the driver listens."""
    end = time.monotonic() + 30
    while True:
        try:
            return begin()
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
