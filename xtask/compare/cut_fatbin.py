"""Makes a library of CUDA's compress well: of the machine code in it, what is not for one kind of device becomes zeros. `cut_fatbin.py IN OUT ARCHITECTURE`, as 90.

Entries keep their places and headers, so the library loads as before; a device of another kind finds nothing in it.
"""

import struct
import sys

CONTAINER = 0xBA55ED50
HEADER_MAX = 4096


def sections(image):
    at = struct.unpack_from("<Q", image, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    found = [struct.unpack_from("<IIQQQQIIQQ", image, at + nth * size) for nth in range(count)]
    texts = found[names][4]
    for section in found:
        begin = texts + section[0]
        yield image[begin : image.index(0, begin)].decode(), section[4], section[5]


def cut(image, architecture):
    """Bytes of code that stay, and that go."""
    kept = gone = 0
    for name, at, length in list(sections(image)):
        if name == "__nv_relfatbin":
            # For linkers alone.
            image[at : at + length] = bytes(length)
        if name != ".nv_fatbin":
            continue
        end = at + length
        while at + 16 <= end:
            magic, _, header, bytes_ = struct.unpack_from("<IHHQ", image, at)
            if magic != CONTAINER:
                at += 8
                continue
            entry, last = at + header, at + header + bytes_
            while entry + 64 <= last:
                _, _, header, payload = struct.unpack_from("<HHIQ", image, entry)
                if not 32 <= header <= HEADER_MAX:
                    break
                if struct.unpack_from("<I", image, entry + 28)[0] == architecture:
                    kept += payload
                else:
                    gone += payload
                    image[entry + header : entry + header + payload] = bytes(payload)
                entry += header + payload
            at = (last + 7) // 8 * 8
    return kept, gone


def main():
    source, target, architecture = sys.argv[1:]
    with open(source, "rb") as file:
        image = bytearray(file.read())
    kept, gone = cut(image, int(architecture))
    if not kept:
        sys.exit(f"{source} has nothing for sm_{architecture}")
    with open(target, "wb") as file:
        file.write(image)
    print(f"{kept / 1e6:.0f} MB of code stay, {gone / 1e6:.0f} MB go")


main()
