"""A headless Chromium, driven by its own chromedriver over HTTP (the W3C WebDriver protocol). No package is needed."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ANSWERS_WITHIN_S = 120.0  # of a hang: a call takes milliseconds, the first page a few seconds
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's key for an element's reference

KEYS = {"Home": "\ue011", "End": "\ue010", "PageUp": "\ue00e", "PageDown": "\ue00f", "ArrowLeft": "\ue012",
        "ArrowUp": "\ue013", "ArrowRight": "\ue014", "ArrowDown": "\ue015"}  # fmt: skip


def found() -> tuple[str, str] | None:
    """The paths of chromedriver and of a browser for it."""
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))
    driver, browser = shutil.which("chromedriver"), next(filter(None, browsers), None)
    return (driver, browser) if driver and browser else None


needs_browser = pytest.mark.skipif(found() is None, reason="there is no chromium with its chromedriver here")


class Browser:
    def __init__(self, home: Path) -> None:
        paths = found()
        assert paths is not None
        driver, browser = paths
        env = {**os.environ, "HOME": str(home), "TMPDIR": str(home), "TZ": "UTC"}
        self._process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        assert self._process.stdout is not None
        port = None
        while port is None and (line := self._process.stdout.readline()):
            port = re.search(r"started successfully on port (\d+)", line)
        assert port is not None, "chromedriver did not start"
        self._at = f"http://127.0.0.1:{port[1]}"
        arguments = ["--headless=new", "--disable-gpu", f"--user-data-dir={home}/profile", "--window-size=1000,900"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")
        options = {"goog:chromeOptions": {"args": arguments, "binary": browser},
                   "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}  # fmt: skip
        try:
            self._at += f"/session/{self._call('/session', {'capabilities': {'alwaysMatch': options}})['sessionId']}"
        except BaseException:
            self._process.kill()
            raise

    def close(self) -> None:
        try:
            self._call("", method="DELETE")
        finally:
            self._process.terminate()
            self._process.wait(ANSWERS_WITHIN_S)
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._at + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ANSWERS_WITHIN_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, page: Path) -> None:
        self.log("browser")
        self.log("performance")
        self._call("/url", {"url": page.absolute().as_uri()})

    def log(self, kind: str) -> list[str]:
        """The messages since the last call: of the console, or of the network."""
        return [entry["message"] for entry in self._call("/se/log", {"type": kind})]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened."""
        messages = [json.loads(message)["message"] for message in self.log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def run(self, script: str, *arguments: Any) -> Any:
        return self._call("/execute/sync", {"script": script, "args": arguments})

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        shown: str = self.run("return document.querySelector(arguments[0]).innerText", selector)
        return shown

    def click(self, selector: str) -> None:
        element = self._call("/element", {"using": "css selector", "value": selector})[ELEMENT]
        self._call(f"/element/{element}/click")

    def press(self, selector: str, *keys: str) -> None:
        element = self._call("/element", {"using": "css selector", "value": selector})[ELEMENT]
        self._call(f"/element/{element}/value", {"text": "".join(KEYS.get(key, key) for key in keys)})

    def drag(self, path: list[tuple[float, float]], kind: str = "mouse") -> None:
        """Presses at the first place of the window, moves on, and lets go."""
        moves = [{"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0} for x, y in path]
        actions = [moves[0], {"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0}]
        source = {"type": "pointer", "id": kind, "parameters": {"pointerType": kind}, "actions": actions}
        self._call("/actions", {"actions": [source]})

    def emulate(self, command: str, **parameters: Any) -> None:
        self._call("/goog/cdp/execute", {"cmd": f"Emulation.{command}", "params": parameters})

    def pdf(self) -> bytes:
        return base64.b64decode(self._call("/print"))

    def picture(self, path: Path) -> None:
        """For a person who wants to look."""
        path.write_bytes(base64.b64decode(self._call("/screenshot", method="GET")))
