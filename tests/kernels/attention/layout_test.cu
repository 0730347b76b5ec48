// The index maps of the MMA kernels, checked on the host: a matrix product is computed by following
// the PTX definitions of ldmatrix and mma lane by lane, with addresses from the maps that the
// kernels use. Needs no GPU.
#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "kernels/attention/decode_plan.h"
#include "kernels/attention/kv_fragments.cuh"
#include "kernels/attention/mask.cuh"
#include "kernels/common/ldmatrix.cuh"
#include "kernels/common/mma.cuh"
#include "tests/kernels/testing/testing.h"

namespace astrai {
namespace {

using namespace astrai::testing;

// A tile of 16-bit integers in the layout of TileRows.
template <int kRowBytes>
struct Tile {
  std::vector<uint16_t> data;
  explicit Tile(int rows) : data(rows * TileRows<kRowBytes>::kStride / 2) {}
  uint16_t& at(int row, int col) {
    return data[TileRows<kRowBytes>::offset(row, col / 8) / 2 + col % 8];
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

template <int kRowBytes>
void check_operands(Rng& rng) {
  check_operand_a<kRowBytes>(rng);
  check_operand_b_of_qk<kRowBytes>(rng);
  check_operand_b_of_pv<kRowBytes>(rng);
}

ASTRAI_TEST(ldmatrix_gives_the_operands_of_mma) {
  Rng rng;
  check_operands<64>(rng);
  check_operands<96>(rng);
  check_operands<128>(rng);
  check_operands<192>(rng);
  check_operands<256>(rng);
  check_operands<384>(rng);
  check_operands<512>(rng);
}

// Tiles of bytes: what a lane gets of ldmatrix, cut in bytes, stands where KvFragments says.
template <int kRowBytes>
void check_byte_operands(Rng& rng) {
  using Fragments = attention::KvFragments<__nv_bfloat16, __nv_fp8_e4m3, kRowBytes>;
  Tile<kRowBytes> tile(32);
  for (auto& x : tile.data) x = static_cast<uint16_t>(rng.integer(0, 65535));
  const auto byte_at = [&](int row, int dim) {
    return tile.at(row, dim / 2) >> dim % 2 * 8 & 0xff;
  };
  for (int key = 0; key < 32; key += 16) {
    for (int step = 0; step < kRowBytes / Fragments::kDims; ++step) {
      uint16_t k[32][4][2], v[32][4][2];
      emulate_ldmatrix(
          tile.data, [&](int lane) { return Fragments(lane).k_walk.at(key, step); }, false, k);
      emulate_ldmatrix(
          tile.data, [&](int lane) { return Fragments(lane).v_walk.at(key, step); }, true, v);
      for (int lane = 0; lane < 32; ++lane) {
        for (int reg = 0; reg < 4; ++reg) {
          for (int half = 0; half < 2; ++half) {  // of the four bytes of a register
            for (int part = 0; part < 2; ++part) {
              // K, register reg: block reg % 2 of 16 dims, n block reg / 2 of 8 keys; bytes 0 and 1
              // are register 0 of the operand.
              const MatrixCoord at = mma_b_coord(lane, half, part);
              const int dim = step * 32 + reg % 2 * 16 + Fragments::k_dim(at.row);
              REQUIRE((k[lane][reg][half] >> part * 8 & 0xff) ==
                      byte_at(key + reg / 2 * 8 + at.col, dim));
              // V, register reg: operand register reg % 2 of block reg / 2 of 16 dims. Its halves
              // are two keys, the bytes of each the n blocks.
              const MatrixCoord of_v = mma_b_coord(lane, reg % 2, half);
              REQUIRE((v[lane][reg][half] >> part * 8 & 0xff) ==
                      byte_at(key + of_v.row,
                              step * 32 + reg / 2 * 16 + Fragments::v_dim(part, of_v.col)));
            }
          }
        }
      }
    }
  }
}

ASTRAI_TEST(ldmatrix_of_bytes_gives_operands_in_another_order_of_dims) {
  Rng rng;
  check_byte_operands<64>(rng);
  check_byte_operands<96>(rng);
  check_byte_operands<128>(rng);
  check_byte_operands<192>(rng);
  check_byte_operands<256>(rng);
}

// The order of dims is a permutation, and a lane's accumulators of two n blocks are 4 neighbours.
ASTRAI_TEST(dims_of_byte_operands_are_a_permutation) {
  using Fragments = attention::KvFragments<__half, __nv_fp8_e4m3, 128>;
  std::set<int> k_dims, v_dims;
  for (int k = 0; k < 16; ++k) k_dims.insert(Fragments::k_dim(k));
  for (int n = 0; n < 8; ++n) {
    v_dims.insert(Fragments::v_dim(0, n));
    v_dims.insert(Fragments::v_dim(1, n));
  }
  EXPECT_TRUE(k_dims.size() == 16 && *k_dims.rbegin() == 15);
  EXPECT_TRUE(v_dims.size() == 16 && *v_dims.rbegin() == 15);
  for (int lane = 0; lane < 32; ++lane) {
    for (int reg = 0; reg < 2; ++reg) {
      for (int half = 0; half < 2; ++half) {
        const int first = Fragments::v_dim(0, mma_c_coord(lane, 0).col);
        EXPECT_EQ(Fragments::v_dim(half, mma_c_coord(lane, reg).col), first + 2 * reg + half);
      }
    }
  }
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
void check_rows() {
  using Rows = TileRows<kRowBytes>;
  constexpr int kChunks = kRowBytes / 16;
  // No two chunks of a tile share a place.
  std::set<uint32_t> seen;
  for (int row = 0; row < 32; ++row) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint32_t offset = Rows::offset(row, chunk);
      EXPECT_EQ(offset % 16, 0u);
      EXPECT_LT(offset, 32u * Rows::kStride);
      seen.insert(offset);
    }
  }
  EXPECT_EQ(seen.size(), size_t{32} * kChunks);
  // No two rows of an 8x8 matrix share a group of 4 banks.
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    std::set<uint32_t> banks;
    for (int row = 8; row < 16; ++row) banks.insert(Rows::offset(row, chunk) / 16 % 8);
    EXPECT_EQ(banks.size(), size_t{8});
  }
  // Nor do two lanes of a quarter warp that copies a part of a row.
  for (int row = 0; row < 8; ++row) {
    for (int first = 0; first + 8 <= kChunks; first += 8) {
      std::set<uint32_t> banks;
      for (int i = 0; i < 8; ++i) banks.insert(Rows::offset(row, first + i) / 16 % 8);
      EXPECT_EQ(banks.size(), size_t{8});
    }
  }
}

ASTRAI_TEST(tiles_have_no_bank_conflicts) {
  check_rows<64>();
  check_rows<96>();
  check_rows<128>();
  check_rows<192>();
  check_rows<256>();
  check_rows<384>();
  check_rows<512>();
  EXPECT_EQ(TileRows<64>::kStride, attention::tile_row_bytes(64, 1));
  EXPECT_EQ(TileRows<192>::kStride, attention::tile_row_bytes(96, 2));
  EXPECT_EQ(TileRows<384>::kStride, attention::tile_row_bytes(192, 2));
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
