"""The logs of a job: from the bytes of every rank, by offset, to lines on a screen. `follow` tells the flow."""
