"""Tests of evaluation: its results at any degree, and that training goes on as without it."""
