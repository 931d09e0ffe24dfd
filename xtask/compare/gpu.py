"""What a GPU has to show, beside its floors and NCCL in the same run: `cargo xtask compare gpu` packs this with the programs that it runs.

    python3 gpu.py [--only collectives,transfers,signals,fused,moe]

Microseconds unless something else is said. A row that is required and not reached is marked MISSED; one whose peer is not here is not judged, and says so. The rows are also left in gpu.jsonl.
"""

import argparse
import json
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
OPS = {"AllReduce": 0.5, "AllGather": 0.6, "ReduceScatter": 0.6, "AllToAll": 0.6}
# Of the floor, where bytes are what takes the time.
FLOOR_SHARE = 75.0
LIMIT_S = 240


class Table:
    def __init__(self):
        self.rows = []

    def row(self, name, weft, unit="us", peer=None, at_most=None, at_least=None, share=None, share_least=None, times_least=None):
        """`at_most` and `at_least` are for Weft's figure, or for its ratio to the peer's where there is a peer; `times_least` for how many times as fast as the peer."""
        ratio = weft / peer if peer else None
        judged, must = [], []
        if times_least is not None:
            must.append(f">= {times_least} times as fast")
            if peer is not None:
                judged.append(peer / weft >= times_least)
        elif at_most is not None:
            must.append(f"<= {at_most}{' of the peer' if unit == 'ratio' else ''}")
            measured = ratio if unit == "ratio" else weft
            if measured is not None:
                judged.append(measured <= at_most)
        elif at_least is not None:
            must.append(f">= {at_least}")
            judged.append(weft >= at_least)
        if share_least is not None:
            must.append(f">= {share_least:.0f} % of the floor")
            judged.append(share is not None and share >= share_least)
        reached = None if not judged else all(judged)
        self.rows.append(dict(name=name, weft=weft, peer=peer, ratio=ratio, share=share, must=", ".join(must), reached=reached))

    def failed(self, name, why):
        print(f"{name}: {why}", flush=True)
        self.rows.append(dict(name=name, weft=None, peer=None, ratio=None, share=None, must=why, reached=False))

    def show(self):
        def number(value):
            return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"

        width = max((len(row["name"]) for row in self.rows), default=10)
        print(f"{'':{width}}  {'Weft':>9} {'peer':>9} {'ratio':>6} {'floor %':>7}  must")
        for row in self.rows:
            mark = {True: "", False: "  MISSED", None: "  (not judged)" if row["must"] else ""}[row["reached"]]
            print(f"{row['name']:{width}}  {number(row['weft']):>9} {number(row['peer']):>9} {number(row['ratio']):>6} {number(row['share']):>7}  {row['must']}{mark}")
        (pathlib.Path(os.environ.get("OUT", HERE)) / "gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        judged = [row for row in self.rows if row["reached"] is not None]
        reached = sum(row["reached"] for row in judged)
        print(f"\n{reached} of {len(judged)} rows that are judged reached what they must; {len(self.rows) - len(judged)} are shown only", flush=True)
        return reached == len(judged)


def said_by(*command, **environment):
    """What a program says; what it had said where it is late, or fails, which is told."""
    if not shutil.which(str(HERE / command[0]) if command[0].startswith("./") else command[0]):
        print(f"{command[0]} is not in this bundle", flush=True)
        return ""
    run = subprocess.Popen(command, cwd=HERE, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = run.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        run.kill()
        said = run.communicate()[0]
        print(f"{command[0]}: not done after {LIMIT_S} s")
    if run.returncode:
        print(f"{' '.join(command)}: ended with {run.returncode}\n{said[-1500:]}", flush=True)
    return said


def nccl():
    """The library, unpacked where it is packed."""
    library, packed = HERE / "libnccl.so.2", HERE / "libnccl.so.2.xz"
    if not library.exists() and packed.exists():
        with lzma.open(packed) as source, open(library, "wb") as target:
            shutil.copyfileobj(source, target)
    return library if library.exists() else None


def collectives(table):
    library = nccl()
    line = re.compile(r"(\w+) (\d+[KM]): ([\d.]+|\w+|-), [^,]+, [^,]+, ([\d.]+|\w+|-); [\d.]+, (\d+) %(?:; NCCL ([\d.]+))?")
    for ranks in (2, 4, 8):
        command = ["./collectives", "--few", "--ranks", str(ranks)]
        said = said_by(*command, *(["--nccl", str(library)] if library else []))
        for line_ in said.splitlines():
            if "NCCL" in line_ and not line.match(line_):
                print(line_)
        trips = dict(re.findall(r"round trip of a (bare flag|signal): ([\d.]+)", said))
        flag = float(trips.get("bare flag", "nan"))
        table.row(f"round trip of a word, {ranks} ranks", flag)
        table.row(f"round trip of a signal, {ranks} ranks", float(trips.get("signal", "nan")))
        found = line.findall(said)
        if not found:
            table.failed(f"collectives of {ranks} ranks", said[-300:])
        for op, size, threads, graph, share, peer in found:
            must = OPS[op]
            name = f"{op} {size} x {ranks}"
            try:
                threads, graph = float(threads), float(graph)
            except ValueError:
                table.failed(name, f"{threads}, {graph}")
                continue
            table.row(f"{name}, threads", threads, "ratio", float(peer) if peer else None, at_most=must)
            large = size == "256M"
            table.row(f"{name}, graph", graph, share=float(share), share_least=FLOOR_SHARE if large else None, at_most=round(3 * flag, 2) if (op, size, ranks) == ("AllReduce", "8K", 8) else None)


def transfers(table):
    def bench(transport, blocks, batches, *more):
        said = said_by("./weft", "bench", "transfer", "--json", "--transport", transport, "--max-bytes", "256MiB", "--seconds", "0.2", "--block", blocks, "--batch", batches, *more)
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    plain = {}
    for more in ((), ("--checksum",)):
        cells = bench("shared_memory.gpu", "4KiB,64MiB", "1", *more) + bench("shared_memory.gpu", "4KiB,16KiB,64KiB", "4096", *more)
        if not cells:
            table.failed("transfers within the card", "nothing was measured")
        for cell in cells:
            key = (cell["op"], cell["block_bytes"], cell["batch"])
            name = f"{cell['op']} {cell['block_bytes'] >> 10} KiB x {cell['batch']} within the card"
            rate = cell["gigabytes_per_sec"]
            if more:
                table.row(f"{name}, what a checksum costs, %", 100 * (1 - rate / plain[key]) if key in plain else float("nan"), "%", at_most=10 if cell["batch"] > 1 or cell["block_bytes"] > 4096 else None)
                continue
            plain[key] = rate
            if key[1:] == (4096, 1):
                table.row(name, cell["p50_us"], at_most=12)
            else:
                least = {(4096, 4096): 900, (16384, 4096): 1450, (65536, 4096): 1800, (64 << 20, 1): 1900}[key[1:]]
                table.row(f"{name}, GB/s", rate, "GB/s", at_least=least)
    for cell in bench("shared_memory.gpu_host", "16KiB", "1024") + bench("shared_memory.gpu_host", "64MiB", "1"):
        table.row(f"{cell['op']} {cell['block_bytes'] >> 10} KiB x {cell['batch']} of the host, GB/s", cell["gigabytes_per_sec"], "GB/s", at_least=45)


def signals(table):
    said = said_by("./device_api", "--exact", "how_long_a_signal_takes_is_told", "--nocapture", "--test-threads=1", WEFT_REQUIRE="gpu")
    for size, scope, took in re.findall(r"put_signal -> wait, (\d+) bytes, (\w+): ([\d.]+) us", said):
        table.row(f"put_signal to wait, {size} B by a {scope}", float(took))
    folder = tempfile.mkdtemp()
    shared = dict(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
    control = shutil.which("nvidia-cuda-mps-control")
    if control:
        subprocess.run([control, "-d"], env={**os.environ, **shared}, check=False)
    said = said_by("./kernel_put", **shared)
    if control:
        subprocess.run([control], input="quit\n", text=True, env={**os.environ, **shared}, check=False)
    found = re.findall(r"(\w+): put_signal -> wait, (\d+) bytes: p50 ([\d.]+) us, p99 ([\d.]+) us", said)
    if not found:
        table.failed("puts through the proxy", said[-300:])
    for over, size, middle, late in found:
        must = over == "shared_memory" and int(size) <= 4096
        table.row(f"put_signal through the proxy over {over}, {size} B, p50", float(middle), at_most=6 if must else None)
        table.row(f"put_signal through the proxy over {over}, {size} B, p99", float(late), at_most=15 if must else None)
    for over, size, source, rate in re.findall(r"(\w+): puts of (\d+) bytes from ([\w ]+): ([\d.]+) GB/s", said):
        table.row(f"puts of {size} B from {source} over {over}, GB/s", float(rate), "GB/s")


def fused(table):
    said = said_by(sys.executable, "beside.py", "./fused")
    shares = {tuple(map(int, key)): float(share) for *key, share in re.findall(r"fused (\d+) (\d+) (\d+): .*; [\d.]+, (\d+) %", said)}
    found = re.findall(r"^(\d+) (\d+) (\d+): ([\d.]+); ([\d.]+) \+ ([\d.]+) ", said, re.M)
    if not found:
        table.failed("fused norms beside torch", said[-300:])
    for ranks, rows, hidden, own, alone, rest in found:
        key = tuple(map(int, (ranks, rows, hidden)))
        table.row(f"all-reduce + residual + norm, {rows} x {hidden}, {ranks} ranks", float(own), peer=float(alone) + float(rest), times_least=1.5, share=shares.get(key))


def moe(table):
    said = said_by(sys.executable, "beside.py", "./moe")
    own = re.findall(r"moe (\d+) (\d+) (\w+) (\w+): .*?dispatch ([\d.]+), \d+ MiB, floor [\d.]+, (\d+) %(?:; combine ([\d.]+), \d+ MiB, floor [\d.]+, (\d+) %)?", said)
    theirs = re.findall(r"^(\d+) (\d+) (\w+): (dispatch|combine)(.*?) ([\d.]+), [\d.]+$", said, re.M)
    if not own:
        table.failed("tokens to experts", said[-300:])
    for ranks, tokens, layout, sent, *figures in own:
        for what, took, share in (("dispatch", *figures[:2]), ("combine", *figures[2:])):
            if not took:
                continue
            # Where moves are known already they are a part of a dispatch, and no composition of it.
            same = [float(us) for r, t, l, w, how, us in theirs if (r, t, l, w) == (ranks, tokens, layout, what) and not (what == "dispatch" and "known" in how)]
            best = min(same) if same and sent == "bf16" else None
            judged = ranks == "8" and sent == "bf16"
            large = judged and tokens == "4096"
            table.row(f"{what} {layout} {sent}, {tokens} tokens, {ranks} ranks", float(took), peer=best, times_least=3 if judged else None, share=float(share), share_least=70 if large else None)


PARTS = {part.__name__: part for part in (collectives, transfers, signals, fused, moe)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(PARTS))
    table = Table()
    for part in parser.parse_args().only.split(","):
        print(f"== {part}", flush=True)
        PARTS[part](table)
    return 0 if table.show() else 1


if __name__ == "__main__":
    sys.exit(main())
