"""Pure state of what viewers have heard: messages go in, frozen frames come out. No I/O, no clock, no drawing."""
