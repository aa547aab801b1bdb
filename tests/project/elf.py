"""The undefined symbols of a shared library, and their versions."""

import struct

DYNSYM, DYNAMIC, VERNEED, VERSYM = 11, 6, 0x6FFFFFFE, 0x6FFFFFFF


def needed_versions(path):
    """Returns the version that each symbol asks for, such as {"memcpy": "GLIBC_2.14"}.

    Reads ELF64, little-endian: the tables .dynsym, .gnu.version and .gnu.version_r.
    """
    content = path.read_bytes()
    assert content[:6] == b"\x7fELF\x02\x01", f"{path} is no ELF64 of little-endian"
    (start,) = struct.unpack_from("<Q", content, 0x28)
    size, count = struct.unpack_from("<HH", content, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, start + i * size) for i in range(count)]
    of_type = {section[1]: section for section in sections}

    def text(section, offset):
        begin = sections[section][4] + offset
        return content[begin : content.index(b"\0", begin)].decode()

    names = {}  # of a version, by its number in .gnu.version
    _, _, _, _, place, _, strings, num_libraries, _, _ = of_type[VERNEED]
    for _ in range(num_libraries):
        _, num_versions, _, first, following = struct.unpack_from("<HHIII", content, place)
        version = place + first
        for _ in range(num_versions):
            _, _, number, name, step = struct.unpack_from("<IHHII", content, version)
            names[number] = text(strings, name)
            version += step
        place += following

    _, _, _, _, symbols, num_bytes, strings, *_ = of_type[DYNSYM]
    numbers = of_type[VERSYM][4]
    found = {}
    for i in range(num_bytes // 24):
        name, _, _, section = struct.unpack_from("<IBBH", content, symbols + 24 * i)
        (number,) = struct.unpack_from("<H", content, numbers + 2 * i)
        if section == 0 and number in names:
            found[text(strings, name)] = names[number]
    return found


def too_new(path, limits):
    """Returns the symbols with a version above its limit, or without a limit.

    Args:
        limits: the newest version allowed, by name, such as {"GLIBC": (2, 28)}.
    """
    found = {}
    for symbol, version in needed_versions(path).items():
        name, _, number = version.rpartition("_")
        if tuple(map(int, number.split("."))) > limits.get(name, ()):
            found[symbol] = version
    return found
