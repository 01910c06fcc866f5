"""What tests that start whole clusters share; tests/conftest.py offers its fixtures."""
