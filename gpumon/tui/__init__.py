"""The screen: pure functions draw lines from a frozen View; one app object feeds it."""
