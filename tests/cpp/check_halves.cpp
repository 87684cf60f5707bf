// float16 and bfloat16 to float32 and back.
#include "check.h"

namespace {

using namespace carousel;

double value_of(int bits) {
  const int power = bits >> 10 & 31, steps = bits & 1023;
  const double size = power ? std::ldexp(1024 + steps, power - 25) : std::ldexp(steps, -24);
  return bits & 0x8000 ? -size : size;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// In the last lane, too.
template <class T>
uint16_t rounded(float value) {
  float values[kLanes] = {value};
  values[kLanes - 1] = value;
  T halves[kLanes];
  store(halves, load(values));
  check::equal("lanes", std::vector<int>{halves[kLanes - 1].bits}, std::vector<int>{halves->bits});
  return halves->bits;
}

void check_number(int bits) {
  const fp16 half{(uint16_t)bits};
  const float wide = to_float(half);
  const int back = rounded<fp16>(wide);
  if ((bits & 0x7c00) != 0x7c00) {
    check::equal("float16, widened", std::vector<double>{wide}, std::vector<double>{value_of(bits)});
  } else if (bits & 1023) {
    check::equal("float16, NaN", std::vector<bool>{wide != wide, (back & 0x7fff) > 0x7c00},
                 std::vector<bool>{true, true});
    return;
  } else {
    check::equal("float16, infinity", std::vector<float>{wide}, std::vector<float>{bits & 0x8000 ? -INFINITY : INFINITY});
  }
  check::equal("float16, as it was", std::vector<int>{back}, std::vector<int>{bits});
}

// Four numbers that follow each other.
void check_bfloat16(int bits) {
  bf16 halves[kLanes];
  std::vector<uint32_t> expected(kLanes), wide(kLanes);
  for (int i = 0; i < kLanes; ++i) {
    halves[i].bits = (uint16_t)(bits + i);
    expected[i] = (uint32_t)halves[i].bits << 16;
  }
  const vfloat values = load(halves);
  std::memcpy(wide.data(), &values, sizeof values);
  check::equal("bfloat16, widened", wide, expected);
  if ((bits & 0x7f80) != 0x7f80 || (bits & 127) == 0) {
    const int back = rounded<bf16>(float_of(expected[0]));
    check::equal("bfloat16, as it was", std::vector<int>{back}, std::vector<int>{bits});
  }
}

template <class T>
void check_rounding(float value) {
  const int expected = check::narrow<T>(value).bits;
  check::equal("rounded to 16 bits", std::vector<int>{rounded<T>(value)}, std::vector<int>{expected});
}

}  // namespace

void check_halves() {
  for (int bits = 0; bits < 1 << 16; ++bits) {
    check_number(bits);
    check_bfloat16(bits);
  }
  for (int bits = 0; bits < 0x7bff; ++bits) {  // between two neighbours: the middle, and beside it
    const float middle = (float)((value_of(bits) + value_of(bits + 1)) / 2);
    for (float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) {
      check_rounding<fp16>(value);
      check_rounding<fp16>(-value);
    }
  }
  for (float value : {65504.0f, 65519.0f, 65520.0f, 1e30f, 1e-30f, 1e-40f}) check_rounding<fp16>(value);
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    for (uint32_t below : {0x7fff, 0x8000, 0x8001}) {
      check_rounding<bf16>(float_of(bits << 16 | below));
      check_rounding<bf16>(float_of(0x80000000 | bits << 16 | below));
    }
  }
  for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    check::equal("bfloat16, NaN", std::vector<bool>{(rounded<bf16>(float_of(bits)) & 0x7fff) > 0x7f80},
                 std::vector<bool>{true});
  }
}
