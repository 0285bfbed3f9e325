"""Runs that are killed, folders that are damaged, disks that are full."""

import pytest

pytest.register_assert_rewrite("tests.crash.runs")
