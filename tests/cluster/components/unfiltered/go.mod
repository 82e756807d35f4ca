module dispatch.test/unfiltered

go 1.26.0
