"""Pure state of a session: messages go in, frozen frames come out. No I/O, no clock, no drawing."""
