// What ranks exchange, and its sums.
#include <thread>

#include "check.h"
#include "exchange.cpp"

namespace {

using namespace carousel;

template <class T>
void check_sum() {
  const int ranks = 3, size = 45;
  const auto slots = check::narrow<T>(check::normal(ranks * size, 1));
  std::vector<double> expected(size);
  for (int i = 0; i < ranks * size; ++i) expected[i % size] += to_float(slots[i]);
  std::vector<T> out(size);
  SumCall call{(const char*)slots.data(), out.data(), size, (int64_t)(size * sizeof(T)), ranks, check::kType<T>};
  carousel_sum(&call);
  check::near("sum", out, expected, check::kStep<T>);
}

}  // namespace

void check_ranks() {
  check_sum<float>();
  check_sum<bf16>();
  check_sum<fp16>();
  alignas(64) static char region[2 * kCounterBytes + 4 * 64];
  const std::vector<int64_t> data{111, 222};
  std::vector<int64_t> seen(2), missing(2);
  const auto run = [&](int rank) {
    ExchangeCall call{region, &data[rank], 8, 64, 1'000'000, 10'000'000'000, 1, rank, 2, 0, 0};
    carousel_exchange(&call);
    missing[rank] = call.missing;
    std::memcpy(&seen[rank], region + 2 * kCounterBytes + (2 + 1 - rank) * 64, 8);
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  check::equal("exchange", seen, std::vector<int64_t>{222, 111});
  check::equal("exchange, missing", missing, std::vector<int64_t>{-1, -1});
}
