"""The first process of the user-mode Linux guest: NFS server, two clients, one story, and then it halts.

Started by nfs_machine.py as `nfs_guest.py UNPACKED OUT STORY`. OUT is a directory of the host, for
reports; the clients see the export at /media/a and /media/b. Uses the kernel's own interfaces: mount(2),
unshare(2), /proc/fs/nfsd.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
SYS_FINIT_MODULE, REBOOT_POWER_OFF, EEXIST = 313, 0x4321FEDC, 17
EXPORT_SIZE = "96m"
MOUNT_TRIES = 40
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), what)


def mount(source: str, target: str, kind: str, options: str = "") -> None:
    check(LIBC.mount(source.encode(), target.encode(), kind.encode(), 0, options.encode()), f"mount {target}")


def load_module(modules: Path, name: str) -> None:
    """A kernel module, after those that it depends on."""
    lines = (modules / "modules.dep").read_text().splitlines()
    needs = dict(line.split(":", 1) for line in lines)
    path = next(path for path in needs if path.endswith(f"/{name}.ko"))
    for file in [*reversed(needs[path].split()), path]:
        descriptor = os.open(modules / file, os.O_RDONLY)
        result = LIBC.syscall(SYS_FINIT_MODULE, descriptor, b"", 0)
        os.close(descriptor)
        if result < 0 and ctypes.get_errno() != EEXIST:
            check(result, f"module {file}")


def start_server(unpacked: Path) -> None:
    """nfsd on a memory file system, NFS v4 only, without the grace period of a restarted server."""
    for directory in ("/var/lib/nfs/rpc_pipefs", "/var/lib/nfs/v4recovery"):
        os.makedirs(directory)
    for file in ("etab", "rmtab"):
        Path("/var/lib/nfs", file).touch()
    modules = next((unpacked / "usr/lib/uml/modules").iterdir())
    for module in ("veth", "nfsd", "nfsv4"):
        load_module(modules, module)
    mount("rpc_pipefs", "/var/lib/nfs/rpc_pipefs", "rpc_pipefs")
    mount("nfsd", "/proc/fs/nfsd", "nfsd")
    run("ip", "link", "set", "lo", "up")
    os.chmod("/srv", 0o777)
    tools = unpacked / "usr/sbin"
    # -i: there is no /etc/exports to read
    run(str(tools / "exportfs"), "-i", "-o", "rw,sync,no_subtree_check,no_root_squash,fsid=0", "*:/srv")
    subprocess.Popen([str(tools / "rpc.mountd"), "-F", "-N", "2", "-N", "3"])
    run(str(tools / "rpc.nfsd"), "-N", "3", "4")
    Path("/proc/fs/nfsd/v4_end_grace").write_text("Y\n")


def start_client(index: int, role: str, out: Path, story: str) -> int:
    """A process with network, mounts and host name of its own that mounts the export and plays a role."""
    to_parent, to_child = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            check(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET), "unshare")
            os.write(to_parent[1], b".")
            os.read(to_child[0], 1)
            os._exit(be_client(index, role, out, story))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.read(to_parent[0], 1)
    ours, theirs = f"s{index}", f"c{index}"
    run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", str(pid))
    run("ip", "addr", "add", f"10.0.{index}.1/24", "dev", ours)
    run("ip", "link", "set", ours, "up")
    os.write(to_child[1], b".")
    return pid


def be_client(index: int, role: str, out: Path, story: str) -> int:
    LIBC.sethostname(role.encode(), len(role))
    run("ip", "link", "set", "lo", "up")
    run("ip", "addr", "add", f"10.0.{index}.2/24", "dev", f"c{index}")
    run("ip", "link", "set", f"c{index}", "up")
    place = f"/media/{role}"
    os.makedirs(place)
    options = f"vers=4.2,addr=10.0.{index}.1,clientaddr=10.0.{index}.2"
    for _ in range(MOUNT_TRIES):
        try:
            mount(f"10.0.{index}.1:/", place, "nfs4", options)
            break
        except ConnectionError:  # the link is not up yet
            time.sleep(0.25)
    stories = Path(__file__).with_name("nfs_stories.py")
    return subprocess.run([sys.executable, str(stories), story, role, place, str(out)]).returncode


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    unpacked, out, story = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    os.environ["LD_LIBRARY_PATH"] = str(unpacked / "usr/lib/x86_64-linux-gnu")
    mount("proc", "/proc", "proc")
    mount("none", "/mnt", "hostfs", str(out))
    for target, options in {"/run": "", "/var/lib": "", "/srv": f"size={EXPORT_SIZE}", "/media": ""}.items():
        mount("tmpfs", target, "tmpfs", options)
    start_server(unpacked)
    clients = [start_client(index, role, Path("/mnt"), story) for index, role in enumerate(("a", "b"))]
    for pid in clients:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os.sync()
    LIBC.reboot(REBOOT_POWER_OFF)
