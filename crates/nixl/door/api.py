"""Holds the Python API of an installed NIXL against that of `weft.nixl`: every name that programs take from it, and every argument.

    api.py          # where NIXL and Weft are installed

What NIXL has and Weft has not is named, and is an error: it is what a program would miss.
"""

import inspect
import sys

import nixl._api
import nixl._bindings
import weft.nixl._api
import weft.nixl._bindings

# Weft's take more than NIXL's do; arguments that NIXL has must be there, under the same name and in the same place.
CLASSES = ("nixl_agent", "nixl_agent_config", "nixl_prepped_dlist_handle", "nixl_xfer_handle", "nixl_thread_sync_t")


def arguments(call):
    return [name for name in inspect.signature(call).parameters if name != "self"]


def members(kind):
    return {name: member for name, member in vars(kind).items() if not name.startswith("_") or name == "__init__"}


def main():
    missing = []
    compared = 0
    for name in CLASSES:
        theirs, ours = getattr(nixl._api, name), getattr(weft.nixl._api, name)
        for member, their in members(theirs).items():
            compared += 1
            our = inspect.getattr_static(ours, member, None)
            if our is None:
                missing.append(f"{name}.{member}")
            elif inspect.isfunction(their):
                wanted, there = arguments(their), arguments(our)
                if there[: len(wanted)] != wanted:
                    missing.append(f"{name}.{member}({', '.join(wanted)}), which is ({', '.join(there)}) here")
    # Of what is compiled, the names are all that can be compared.
    for name in dir(nixl._bindings):
        if name.startswith("__"):
            continue
        compared += 1
        their = getattr(nixl._bindings, name)
        if not hasattr(weft.nixl._bindings, name):
            missing.append(f"_bindings.{name}")
        elif isinstance(their, type) and not issubclass(their, BaseException):
            # Methods that every class of pybind11's has are none of NIXL's.
            for member in members(their):
                compared += 1
                if not hasattr(getattr(weft.nixl._bindings, name), member) and member not in ("name", "value", "__init__"):
                    missing.append(f"_bindings.{name}.{member}")
    for one in missing:
        print(f"  missing: {one}")
    print(f"{compared} names of NIXL's compared, {len(missing)} missing or otherwise")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
