// Two agents hand blocks over, with weft.hpp: what would be two processes is one here, for brevity.
//
//     cargo build -p weft-c
//     c++ -std=c++17 -Icrates/c/include examples/c/transfer.cpp -Ltarget/debug -lweft -Wl,-rpath,target/debug -o transfer
//     ./transfer
#include <iostream>
#include <numeric>
#include <vector>
#include <weft.hpp>

using namespace std::chrono_literals;

int main() try {
    weft::Agent owner("owner"), reader("reader");

    // Memory that the program has already: what is registered must be deregistered before it goes.
    std::vector<uint32_t> numbers(1 << 20);
    std::iota(numbers.begin(), numbers.end(), 0);
    weft::Memory theirs = owner.register_memory(numbers.data(), numbers.size() * sizeof numbers[0]);
    owner.publish("numbers", theirs, WEFT_ACCESS_READ_WRITE);

    weft::Peer peer = reader.connect(owner.address(), 5s);
    weft::Region region = peer.region("numbers", 5s);
    weft::Memory mine = reader.allocate(region.length());
    weft_summary summary = peer.read({weft::leg(mine, region)}, weft::Options().deadline(5s).checksum(true)).wait();
    std::cout << "read " << summary.bytes << " bytes over " << summary.transport << "; the last number is "
              << mine.as<uint32_t>()[numbers.size() - 1] << '\n';

    // The middle goes back, doubled, and the owner is told of it when it is there.
    const uint64_t quarter = region.length() / 4;
    for (uint64_t at = quarter / 4; at < 3 * quarter / 4; at++) mine.as<uint32_t>()[at] *= 2;
    const std::vector<weft_span> middle{{quarter, 2 * quarter}};
    weft::Transfer back = peer.write({weft::leg(mine, middle, region, middle)}, weft::Options().notify("doubled"));
    if (auto told = owner.notification(5s))
        std::cout << "the owner is told \"" << told->payload() << "\" by " << told->peer().name() << ", and the middle is "
                  << numbers[numbers.size() / 2] << '\n';
    back.wait();

    std::cout << "a word was " << peer.fetch_add(region, 8, 1) << ", and then " << peer.compare_swap(region, 8, 0, 0) << '\n';

    theirs.deregister(5s);
    try {
        peer.read({weft::leg(mine, region)}, weft::Options().deadline(5s)).wait();
    } catch (const weft::Error &error) {
        std::cout << "afterwards: " << error.name() << '\n';
    }
    return 0;
} catch (const weft::Error &error) {
    std::cerr << error.name() << ": " << error.what() << '\n';
    return 1;
}
