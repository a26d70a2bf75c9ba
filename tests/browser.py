"""A real Chromium without a window, spoken to over its DevTools protocol: enough to open a page, look and touch."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 60.0
ENOUGH_CONTRAST = 4.5  # WCAG 2, AA, for text of any size


def find_chromium() -> str | None:
    """$CHROMIUM, or the first of the usual names on the path."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. What went wrong in it and what it asked of a network is kept in `errors` and `requests`."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=TIMEOUT_S, suppress_origin=True)
        self._number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = self._next()
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.errors.clear()
        self.requests.clear()
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass
        self.wait_for_drawing()

    def wait_for_drawing(self) -> None:
        """Two frames: observers of sizes and of scrolling have been called by then."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def js(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))

    def table(self, name: str) -> list[list[dict[str, str]]]:
        """Text and title of each cell of the table with that id."""
        cells = "[...row.cells].map((cell) => ({text: cell.textContent, title: cell.title}))"
        return list(self.js(f"[...document.querySelectorAll('#{name} tbody tr')].map((row) => {cells})"))

    def assert_sound(self, file: Path) -> None:
        """Nothing went wrong, and nothing but the file itself was asked for."""
        assert self.errors == []
        assert self.requests == [file.resolve().as_uri()]

    def assert_readable(self, *, dark: bool) -> None:
        texts = self.js((Path(__file__).parent / "data" / "contrast.js").read_text())
        assert len(texts) > 20
        assert [each for each in texts if each["ratio"] < ENOUGH_CONTRAST] == []
        ground = self.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(ground) < 60) if dark else (min(ground) > 200)

    def close(self) -> None:
        self._socket.close()

    def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv())
        about = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.errors.append(str(about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(about["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
        return message


@contextmanager
def chromium(executable: str) -> Iterator[Page]:
    """One browser with one tab, ended with the context."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Root has no sandbox; a container's /dev/shm is small.
        command = [
            executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            page = Page(_tab(browser))
            yield page
            page.call("Browser.close")  # so that its own processes end in order
            page.close()
            browser.wait(TIMEOUT_S)
        finally:
            browser.kill()
            browser.wait()


def _tab(browser: subprocess.Popen[str]) -> str:
    """The address of the first tab, from the line that the browser prints when it listens."""
    assert browser.stderr is not None
    said = []
    for line in browser.stderr:
        said.append(line)
        found = re.search(r"listening on ws://([^/]+)/", line)
        if found:
            break
    else:
        raise RuntimeError(f"Chromium did not start: {''.join(said)[-2000:]}")
    whole = websocket.create_connection(f"ws://{found[1]}{_path(line)}", timeout=TIMEOUT_S, suppress_origin=True)
    whole.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
    targets = json.loads(whole.recv())["result"]["targetInfos"]
    whole.close()
    tab = next(target for target in targets if target["type"] == "page")
    return f"ws://{found[1]}/devtools/page/{tab['targetId']}"


def _path(line: str) -> str:
    return line[line.index("/devtools") :].strip()
