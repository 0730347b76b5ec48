// The index maps of the MMA kernels, checked on the host: a matrix product is computed by following
// the PTX definitions of ldmatrix and mma lane by lane, with addresses from the maps that the
// kernels use. Needs no GPU.
#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "kernels/attention/mask.cuh"
#include "kernels/common/ldmatrix.cuh"
#include "kernels/common/mma.cuh"
#include "tests/kernels/testing/testing.h"

namespace astrai {
namespace {

using namespace astrai::testing;

// A swizzled tile of 16-bit integers.
template <int kRowBytes>
struct Tile {
  std::vector<uint16_t> data;
  explicit Tile(int rows) : data(rows * kRowBytes / 2) {}
  uint16_t& at(int row, int col) {
    return data[swizzled_offset<kRowBytes>(row, col / 8) / 2 + col % 8];
  }
};

// ldmatrix.x4: lane 8 i + r gives the address of row r of matrix i; register i of lane l holds, of
// matrix i, the elements (l / 4, l % 4 * 2) and the next one, or with .trans (l % 4 * 2, l / 4) and
// the one below.
template <typename AddressOf>
void emulate_ldmatrix(const std::vector<uint16_t>& smem, AddressOf address_of, bool trans,
                      uint16_t (&registers)[32][4][2]) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      for (int part = 0; part < 2; ++part) {
        const int row = trans ? lane % 4 * 2 + part : lane / 4;
        const int col = trans ? lane / 4 : lane % 4 * 2 + part;
        registers[lane][reg][part] = smem[address_of(reg * 8 + row) / 2 + col];
      }
    }
  }
}

template <int kRowBytes>
void check_operand_a(Rng& rng) {
  Tile<kRowBytes> tile(64);
  for (auto& x : tile.data) x = static_cast<uint16_t>(rng.integer(0, 65535));
  for (int row = 0; row < 64; row += 16) {
    for (int block = 0; block < kRowBytes / 32; ++block) {
      uint16_t a[32][4][2];
      emulate_ldmatrix(
          tile.data,
          [&](int lane) {
            return LdmatrixWalk<kRowBytes>(ldmatrix_rows_first(lane)).at(row, block);
          },
          false, a);
      for (int lane = 0; lane < 32; ++lane) {
        for (int reg = 0; reg < 4; ++reg) {
          for (int part = 0; part < 2; ++part) {
            const MatrixCoord at = mma_a_coord(lane, reg, part);
            REQUIRE(a[lane][reg][part] == tile.at(row + at.row, block * 16 + at.col));
          }
        }
      }
    }
  }
}

// K tile [key][dim]: registers 0, 1 are the B operand (k = dim, n = key) of keys 0..7, registers 2,
// 3 of keys 8..15.
template <int kRowBytes>
void check_operand_b_of_qk(Rng& rng) {
  Tile<kRowBytes> tile(64);
  for (auto& x : tile.data) x = static_cast<uint16_t>(rng.integer(0, 65535));
  for (int row = 0; row < 64; row += 16) {
    for (int block = 0; block < kRowBytes / 32; ++block) {
      uint16_t b[32][4][2];
      emulate_ldmatrix(
          tile.data,
          [&](int lane) {
            return LdmatrixWalk<kRowBytes>(ldmatrix_cols_first(lane)).at(row, block);
          },
          false, b);
      for (int lane = 0; lane < 32; ++lane) {
        for (int reg = 0; reg < 4; ++reg) {
          for (int part = 0; part < 2; ++part) {
            const MatrixCoord at = mma_b_coord(lane, reg % 2, part);
            REQUIRE(b[lane][reg][part] == tile.at(row + reg / 2 * 8 + at.col, block * 16 + at.row));
          }
        }
      }
    }
  }
}

// V tile [key][dim], transposed on the way: registers 0, 1 are the B operand (k = key, n = dim) of
// dims 0..7, registers 2, 3 of dims 8..15.
template <int kRowBytes>
void check_operand_b_of_pv(Rng& rng) {
  Tile<kRowBytes> tile(64);
  for (auto& x : tile.data) x = static_cast<uint16_t>(rng.integer(0, 65535));
  for (int row = 0; row < 64; row += 16) {
    for (int block = 0; block < kRowBytes / 32; ++block) {
      uint16_t b[32][4][2];
      emulate_ldmatrix(
          tile.data,
          [&](int lane) {
            return LdmatrixWalk<kRowBytes>(ldmatrix_rows_first(lane)).at(row, block);
          },
          true, b);
      for (int lane = 0; lane < 32; ++lane) {
        for (int reg = 0; reg < 4; ++reg) {
          for (int part = 0; part < 2; ++part) {
            const MatrixCoord at = mma_b_coord(lane, reg % 2, part);
            REQUIRE(b[lane][reg][part] == tile.at(row + at.row, block * 16 + reg / 2 * 8 + at.col));
          }
        }
      }
    }
  }
}

ASTRAI_TEST(ldmatrix_gives_the_operands_of_mma) {
  Rng rng;
  check_operand_a<128>(rng);
  check_operand_a<256>(rng);
  check_operand_a<512>(rng);
  check_operand_b_of_qk<128>(rng);
  check_operand_b_of_qk<256>(rng);
  check_operand_b_of_qk<512>(rng);
  check_operand_b_of_pv<128>(rng);
  check_operand_b_of_pv<256>(rng);
  check_operand_b_of_pv<512>(rng);
}

// The accumulators of two neighbouring n blocks are, register by register, the A operand of 16
// columns.
ASTRAI_TEST(accumulators_of_scores_are_the_operand_of_the_second_product) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      for (int part = 0; part < 2; ++part) {
        const MatrixCoord a = mma_a_coord(lane, reg, part);
        // Packed as p[reg] = (s[reg / 2][2 * (reg % 2)], s[reg / 2][2 * (reg % 2) + 1]).
        const MatrixCoord c = mma_c_coord(lane, 2 * (reg % 2) + part);
        EXPECT_EQ(a.row, c.row);
        EXPECT_EQ(a.col, c.col + reg / 2 * 8);
      }
    }
  }
}

template <int kRowBytes>
void check_swizzle() {
  // A permutation of the tile's chunks.
  std::set<uint32_t> seen;
  for (int row = 0; row < 32; ++row) {
    for (int chunk = 0; chunk < kRowBytes / 16; ++chunk) {
      const uint32_t offset = swizzled_offset<kRowBytes>(row, chunk);
      EXPECT_EQ(offset % 16, 0u);
      EXPECT_LT(offset, 32u * kRowBytes);
      seen.insert(offset);
    }
  }
  EXPECT_EQ(seen.size(), size_t{32} * kRowBytes / 16);
  // No two rows of an 8x8 matrix share a group of 4 banks, nor two lanes of a quarter warp that
  // copies a row.
  for (int chunk = 0; chunk < kRowBytes / 16; ++chunk) {
    std::set<uint32_t> banks;
    for (int row = 8; row < 16; ++row) {
      banks.insert(swizzled_offset<kRowBytes>(row, chunk) / 16 % 8);
    }
    EXPECT_EQ(banks.size(), size_t{8});
  }
  for (int row = 0; row < 8; ++row) {
    for (int first = 0; first < kRowBytes / 16; first += 8) {
      std::set<uint32_t> banks;
      for (int i = 0; i < 8; ++i) {
        banks.insert(swizzled_offset<kRowBytes>(row, first + i) / 16 % 8);
      }
      EXPECT_EQ(banks.size(), size_t{8});
    }
  }
}

ASTRAI_TEST(swizzled_tiles_have_no_bank_conflicts) {
  check_swizzle<128>();
  check_swizzle<256>();
  check_swizzle<512>();
}

ASTRAI_TEST(mask_bytes_become_bits) {
  Rng rng;
  for (int n = 0; n < 100000; ++n) {
    uint8_t bytes[4];
    uint32_t expected = 0;
    for (int i = 0; i < 4; ++i) {
      const int64_t kind = rng.integer(0, 3);
      bytes[i] = static_cast<uint8_t>(kind == 0   ? 0
                                      : kind == 1 ? 1
                                      : kind == 2 ? 0x80
                                                  : rng.integer(0, 255));
      expected |= static_cast<uint32_t>(bytes[i] != 0) << i;
    }
    uint32_t word;
    std::memcpy(&word, bytes, 4);
    REQUIRE(attention::nonzero_bytes(word) == expected);
  }
}

}  // namespace
}  // namespace astrai
