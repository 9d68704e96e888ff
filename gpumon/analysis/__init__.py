"""Pure functions from frames to statements: ledger, estimate, forecast, findings. No I/O, no clock, no drawing."""
