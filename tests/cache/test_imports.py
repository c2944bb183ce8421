from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["allocator", "keys", "manager", "prefix", "report", "eviction", "slots"])
def test_the_accounts_load_no_torch(module: str) -> None:
    program = f"import sys, pagedkv.cache.{module}; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
