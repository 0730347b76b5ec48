// Registry, output and main() of tests written with testing.h.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/kernels/testing/testing.h"

namespace astrai::testing {
namespace {

struct Result {
  std::string name;
  double seconds = 0;
  std::vector<std::string> failures;
  std::string skipped;  // the reason; empty if it ran
};

// The state of the one run that a test binary makes; cases run one after the other.
struct Run {
  uint64_t seed = 0;
  Result* current = nullptr;
  std::vector<std::string> contexts;
};

Run& run() {
  static Run state;
  return state;
}

std::string xml_escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        // Other control characters are not allowed in XML 1.0.
        out += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? '?' : c;
    }
  }
  return out;
}

bool write_junit(const char* path, const std::string& suite, const std::vector<Result>& results) {
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", path);
    return false;
  }
  size_t failed = 0, skipped = 0;
  double seconds = 0;
  for (const Result& r : results) {
    failed += !r.failures.empty();
    skipped += !r.skipped.empty();
    seconds += r.seconds;
  }
  std::fprintf(file, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n");
  std::fprintf(file,
               "  <testsuite name=\"%s\" tests=\"%zu\" failures=\"%zu\" errors=\"0\" "
               "skipped=\"%zu\" time=\"%.3f\">\n",
               xml_escaped(suite).c_str(), results.size(), failed, skipped, seconds);
  for (const Result& r : results) {
    std::fprintf(file, "    <testcase classname=\"%s\" name=\"%s\" time=\"%.3f\">\n",
                 xml_escaped(suite).c_str(), xml_escaped(r.name).c_str(), r.seconds);
    for (const std::string& failure : r.failures) {
      std::fprintf(file, "      <failure message=\"%s\"/>\n", xml_escaped(failure).c_str());
    }
    if (!r.skipped.empty()) {
      std::fprintf(file, "      <skipped message=\"%s\"/>\n", xml_escaped(r.skipped).c_str());
    }
    std::fprintf(file, "    </testcase>\n");
  }
  std::fprintf(file, "  </testsuite>\n</testsuites>\n");
  return std::fclose(file) == 0;
}

void run_case(const TestCase& test, Result& result) {
  run().current = &result;
  const auto start = std::chrono::steady_clock::now();
  try {
    test.body();
  } catch (const Skip& skip) {
    // A case that failed before it was skipped has failed.
    if (result.failures.empty()) result.skipped = skip.what();
  } catch (const std::exception& error) {
    result.failures.push_back(error.what());
    std::printf("    %s\n", error.what());
  }
  run().contexts.clear();
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int main(int argc, char** argv) {
  const char* filter = std::getenv("TESTBRIDGE_TEST_ONLY");
  for (int i = 1; i < argc; ++i) {
    constexpr const char kFilter[] = "--filter=";
    if (std::strncmp(argv[i], kFilter, sizeof(kFilter) - 1) != 0) {
      std::fprintf(stderr, "usage: %s [--filter=TEXT]\n", argv[0]);
      return 2;
    }
    filter = argv[i] + sizeof(kFilter) - 1;
  }
  if (const char* seed = std::getenv("ASTRAI_TEST_SEED")) {
    run().seed = std::strtoull(seed, nullptr, 10);
  } else {
    run().seed = std::random_device{}();
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(run().seed));

  std::vector<Result> results;
  size_t passed = 0, failed = 0, skipped = 0;
  for (const TestCase& test : registry()) {
    if (filter != nullptr && std::strstr(test.name, filter) == nullptr) continue;
    Result result;
    result.name = test.name;
    run_case(test, result);
    const char* word = "ok";
    if (!result.failures.empty()) {
      word = "FAILED";
      ++failed;
    } else if (!result.skipped.empty()) {
      word = "skipped";
      ++skipped;
    } else {
      ++passed;
    }
    std::printf("%-7s %s (%.2f s)%s%s\n", word, test.name, result.seconds,
                result.skipped.empty() ? "" : ": ", result.skipped.c_str());
    std::fflush(stdout);
    results.push_back(std::move(result));
  }
  std::printf("%zu passed, %zu failed, %zu skipped\n", passed, failed, skipped);

  std::string suite = argv[0];
  suite = suite.substr(suite.find_last_of('/') + 1);
  if (const char* path = std::getenv("XML_OUTPUT_FILE")) {
    if (!write_junit(path, suite, results)) return 1;
  }
  if (results.empty()) {
    std::fprintf(stderr, "no case ran\n");
    return 1;
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace

std::vector<TestCase>& registry() {
  static std::vector<TestCase> cases;
  return cases;
}

void add_failure(const char* file, int line, const std::string& message) {
  std::string text = std::string(file) + ":" + std::to_string(line) + ": " + message;
  for (const std::string& context : run().contexts) text += " [" + context + "]";
  // Hundreds of wrong elements say no more than the first few.
  constexpr size_t kShown = 20;
  Result& result = *run().current;
  if (result.failures.size() < kShown) std::printf("    %s\n", text.c_str());
  if (result.failures.size() <= kShown) result.failures.push_back(text);
}

Context::Context(std::string text) { run().contexts.push_back(std::move(text)); }
Context::~Context() {
  if (!run().contexts.empty()) run().contexts.pop_back();
}

Rng::Rng() {
  uint64_t hash = 14695981039346656037ull;  // FNV-1a of the case's name
  for (const char c : run().current->name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  }
  engine_.seed(hash ^ run().seed);
}

}  // namespace astrai::testing

int main(int argc, char** argv) { return astrai::testing::main(argc, argv); }
