"""The terminal of a session on a simulated host."""

import asyncio
import os
import pty

from podway.hosts.ssh.stdio_server import _streams


def test_the_last_words_of_a_program_are_read_after_its_end() -> None:
    async def read() -> bytes:
        terminal, program = pty.openpty()
        os.write(program, b"last words")
        os.close(program)
        reader, writer = await _streams(terminal)
        while not reader.at_eof() and reader.exception() is None and not reader._eof:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)  # the end has come before anybody reads
        try:
            return await reader.read()
        finally:
            writer.close()

    assert asyncio.run(asyncio.wait_for(read(), 60)) == b"last words"
