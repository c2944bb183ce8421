"""Draws the cache map under load for the docs: docs/images/cache-map-{light,dark,phone}.png.

    python tools/screenshot_cache_map.py [--out DIR]

Starts a server of its own on a free port with the default model, keeps a few chats running that share prefixes, and
takes the pictures with a headless Chromium (Debian: apt-get install chromium chromium-driver).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

SYSTEM = "You are a guide to the library of Alexandria. Answer in one short paragraph. " * 8
QUESTIONS = ["Who founded it?", "How many scrolls did it hold?", "How did it end?", "Where did it stand?"]


def browser(*, dark: bool, width: int, height: int) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--window-size={width},{height}",
        f"--user-data-dir={tempfile.mkdtemp()}",
        *(("--force-dark-mode", "--blink-settings=preferredColorScheme=0") if dark else ()),
    ):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    if width < 500:  # a window has a least width; the viewport can be told
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    return driver


def keep_busy(url: str, stop: threading.Event, number: int) -> None:
    """One client: chats of several turns, until told to stop."""
    with httpx.Client(base_url=url, timeout=120) as http:
        turn = number
        while not stop.is_set():
            messages = [{"role": "system", "content": SYSTEM + f"Speak as guide {turn % 3}."}]
            for question in QUESTIONS:
                messages.append({"role": "user", "content": question})
                body = {"messages": messages, "max_tokens": 64, "temperature": 0.8}
                answer = http.post("/v1/chat/completions", json=body).json()
                messages.append(answer["choices"][0]["message"] | {"tool_calls": None, "refusal": None})
                if stop.is_set():
                    return
            turn += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "images")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pagedkv", "serve", "smollm2-135m", "--port", "0", "--cache-map-show-text"]
    command += ["--num-gpu-blocks-override", "640"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    stop = threading.Event()
    clients: list[threading.Thread] = []
    try:
        assert server.stderr is not None
        found = next(m for m in (re.search(r"running on (\S+)", line) for line in server.stderr) if m)
        threading.Thread(target=lambda: [None for _ in server.stderr or ()], daemon=True).start()
        clients += [threading.Thread(target=keep_busy, args=(found[1], stop, i)) for i in range(6)]
        for client in clients:
            client.start()
        time.sleep(20)
        for name, dark, width, height in (
            ("light", False, 1280, 900),
            ("dark", True, 1280, 900),
            ("phone", False, 390, 844),
        ):
            driver = browser(dark=dark, width=width, height=height)
            try:
                driver.get(f"{found[1]}/cache")
                time.sleep(8)
                driver.save_screenshot(str(out / f"cache-map-{name}.png"))
            finally:
                driver.quit()
    finally:
        stop.set()
        for client in clients:
            client.join()
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
