#pragma once

// Two macros and a way to read what was written to standard error.

#include <cstdio>
#include <cstdlib>
#include <string>

#include <unistd.h>

#define CHECK(condition)                                                                                               \
    do                                                                                                                 \
    {                                                                                                                  \
        if (!(condition))                                                                                              \
        {                                                                                                              \
            std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                                        \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (false)

#define CHECK_CONTAINS(text, part)                                                                                     \
    do                                                                                                                 \
    {                                                                                                                  \
        std::string const checkedText = (text);                                                                        \
        std::string const checkedPart = (part);                                                                        \
        if (checkedText.find(checkedPart) == std::string::npos)                                                        \
        {                                                                                                              \
            std::printf("%s:%d: '%s' is not in: %s\n", __FILE__, __LINE__, checkedPart.c_str(), checkedText.c_str());  \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (false)

//! What `body` writes to standard error.
template <typename Body>
std::string capturedStderr(Body&& body)
{
    std::fflush(stderr);
    std::FILE* file = std::tmpfile();
    CHECK(file != nullptr);
    int const saved = dup(2);
    CHECK(dup2(fileno(file), 2) == 2);
    body();
    std::fflush(stderr);
    CHECK(dup2(saved, 2) == 2);
    close(saved);
    std::string text;
    std::rewind(file);
    char buffer[512];
    for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), file)) > 0;)
    {
        text.append(buffer, n);
    }
    std::fclose(file);
    return text;
}
