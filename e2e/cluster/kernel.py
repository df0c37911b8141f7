#!/usr/bin/env python3
"""What the kernel says of a link and iproute2 of Debian 12 can't show, and BPF programs without a compiler. Prints JSON.

    kernel.py features LINK         ethtool features by the kernel's names
    kernel.py off LINK              turns TSO and GRO off
    kernel.py sizes LINK            GSO and GRO sizes
    kernel.py tcx LINK              names of the programs on TCX ingress and egress
    kernel.py load FILE NAME        a program that lets everything pass, pinned as FILE
    kernel.py tcx-attach LINK FILE  attaches it to TCX ingress
"""
import array, ctypes, fcntl, json, os, socket, struct, sys

# --- ethtool: include/uapi/linux/ethtool.h ---
SIOCETHTOOL, GSTRINGS, GSSET_INFO, GFEATURES, SS_FEATURES = 0x8946, 0x1B, 0x37, 0x3A, 4
STSO, SGRO = 0x1F, 0x2C


def ethtool(link, request):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        buffer = array.array("B", request)
        fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sQ16x", link.encode(), buffer.buffer_info()[0]))
        return buffer.tobytes()


def features(link):
    count = struct.unpack_from("I", ethtool(link, struct.pack("IIQI", GSSET_INFO, 0, 1 << SS_FEATURES, 0)), 16)[0]
    strings = ethtool(link, struct.pack("III", GSTRINGS, SS_FEATURES, count) + bytes(32 * count))[12:]
    blocks = (count + 31) // 32
    answer = ethtool(link, struct.pack("II", GFEATURES, blocks) + bytes(16 * blocks))
    names = [strings[32 * i : 32 * i + 32].split(b"\0")[0].decode() for i in range(count)]
    active = [struct.unpack_from("I", answer, 8 + 16 * block + 8)[0] for block in range(blocks)]
    return {name: bool(active[i // 32] >> (i % 32) & 1) for i, name in enumerate(names) if name}


def off(link):
    for command in (STSO, SGRO):
        ethtool(link, struct.pack("II", command, 0))


# --- link attributes: include/uapi/linux/if_link.h ---
SIZES = {41: "gsoMaxSize", 58: "groMaxSize", 63: "gsoIPv4MaxSize", 64: "groIPv4MaxSize"}


def sizes(link):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
        index = socket.if_nametoindex(link)
        route.send(struct.pack("IHHII", 32, 18, 1, 1, 0) + struct.pack("BxHiII", 0, 0, index, 0, 0))  # RTM_GETLINK
        message = route.recv(1 << 20)
    found, at, end = {}, 32, struct.unpack_from("I", message)[0]
    while at < end:
        length, kind = struct.unpack_from("HH", message, at)
        if kind in SIZES:
            found[SIZES[kind]] = struct.unpack_from("I", message, at + 4)[0]
        at += (length + 3) & ~3
    return found


# --- bpf(2): include/uapi/linux/bpf.h ---
NUMBER = {"x86_64": 321, "aarch64": 280}[os.uname().machine]
LOAD, PIN, GET, ATTACH, FD_BY_ID, INFO, QUERY = 5, 6, 7, 8, 13, 15, 16
SCHED_CLS, INGRESS, EGRESS = 3, 46, 47
LIBC = ctypes.CDLL(None, use_errno=True)


def bpf(command, attributes):
    buffer = ctypes.create_string_buffer(attributes, 144)
    done = LIBC.syscall(NUMBER, command, buffer, 144)
    if done < 0:
        raise OSError(ctypes.get_errno(), f"bpf command {command}: {os.strerror(ctypes.get_errno())}")
    return done, buffer.raw


def load(file, name):
    code = ctypes.create_string_buffer(struct.pack("BBhiBBhi", 0xB7, 0, 0, -1, 0x95, 0, 0, 0))  # r0 = TC_ACT_UNSPEC; exit
    licence, path = ctypes.create_string_buffer(b"GPL"), ctypes.create_string_buffer(file.encode())
    where = map(ctypes.addressof, (code, licence))
    program, _ = bpf(LOAD, struct.pack("IIQQIIQII16s", SCHED_CLS, 2, *where, 0, 0, 0, 0, 0, name.encode()))
    bpf(PIN, struct.pack("QI", ctypes.addressof(path), program))


def tcx_attach(link, file):
    path = ctypes.create_string_buffer(file.encode())
    program, _ = bpf(GET, struct.pack("Q", ctypes.addressof(path)))
    bpf(ATTACH, struct.pack("IIII", socket.if_nametoindex(link), program, INGRESS, 0))


def tcx(link):
    return {"ingress": programs(link, INGRESS), "egress": programs(link, EGRESS)}


def programs(link, where):
    ids = (ctypes.c_uint32 * 64)()
    query = struct.pack("IIIIQI", socket.if_nametoindex(link), where, 0, 0, ctypes.addressof(ids), 64)
    count = struct.unpack_from("I", bpf(QUERY, query)[1], 24)[0]
    return [program_name(number) for number in ids[:count]]


def program_name(number):
    program, _ = bpf(FD_BY_ID, struct.pack("I", number))
    info = ctypes.create_string_buffer(80)  # of bpf_prog_info: as far as the name, which is at 64
    bpf(INFO, struct.pack("IIQ", program, 80, ctypes.addressof(info)))
    return info.raw[64:80].split(b"\0")[0].decode()


VERBS = {"features": features, "off": off, "sizes": sizes, "tcx": tcx, "load": load, "tcx-attach": tcx_attach}
if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in VERBS:
        sys.exit(__doc__)
    print(json.dumps(VERBS[sys.argv[1]](*sys.argv[2:])))
