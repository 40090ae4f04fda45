"""A headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tornado.ioloop import IOLoop
from tornado.websocket import websocket_connect

CHROMIUM = shutil.which("chromium")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


class Browser:
    """One tab of a new browser.

    Attributes:
      events: the parameters of all events, by their name.

    Args:
      profile: an empty folder.
    """

    def __init__(self, profile: Path) -> None:
        self.events: dict[str, list[Any]] = {}
        command = [str(CHROMIUM), *_FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self._loop, self._number = IOLoop(), 0
        end = time.monotonic() + 60
        while not (tabs := self._tabs(profile / "DevToolsActivePort")):
            assert time.monotonic() < end, "chromium does not start"
            time.sleep(0.1)
        url = tabs[0]["webSocketDebuggerUrl"]
        self._socket = self._wait(lambda: websocket_connect(url, max_message_size=2**27))
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    @staticmethod
    def _tabs(port_file: Path) -> list[dict[str, str]]:
        lines = port_file.read_text().split() if port_file.is_file() else []
        if len(lines) < 2:  # the file is being written
            return []
        with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
            return [tab for tab in json.load(answer) if tab["type"] == "page"]

    def _wait(self, call: Callable[[], Any]) -> Any:
        return self._loop.run_sync(call, timeout=60)

    def _message(self) -> dict[str, Any]:
        message = json.loads(self._wait(self._socket.read_message))
        if "method" in message:
            self.events.setdefault(message["method"], []).append(message["params"])
        return message

    def call(self, method: str, **params: Any) -> Any:
        """Return the result of a command."""
        self._number += 1
        text = json.dumps({"id": self._number, "method": method, "params": params})
        self._wait(lambda: self._socket.write_message(text))
        while (message := self._message()).get("id") != self._number:
            pass
        assert "error" not in message, message["error"]
        return message["result"]

    def open(self, file: Path, width: int = 1100, theme: str = "light") -> None:
        """Open a file in a window of ``width`` pixels and wait for its load event."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.media("screen", theme)
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        while "Page.loadEventFired" not in self.events:
            self._message()

    def media(self, media: str, theme: str = "light") -> None:
        """Show the page as on a screen or in print."""
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def value(self, javascript: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=javascript, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def close(self) -> None:
        """End the browser."""
        self._socket.close()
        self._process.terminate()
        self._process.wait(60)
        self._loop.close()
