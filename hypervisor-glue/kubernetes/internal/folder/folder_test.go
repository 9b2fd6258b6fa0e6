package folder

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const other = 65533

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestLinksOfOthersAreNotFollowed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("root alone can act as another user")
	}
	root := t.TempDir()
	must(t, os.Chmod(root, 0o755))
	real := filepath.Join(root, "real")
	must(t, os.Mkdir(real, 0o755))
	good := filepath.Join(root, "run")
	must(t, os.Symlink("real", good))
	folder, err := Make(filepath.Join(good, "claims/a"))
	must(t, err)
	must(t, folder.Close())
	if _, err := os.Stat(filepath.Join(real, "claims/a")); err != nil {
		t.Fatal(err)
	}

	home := filepath.Join(root, "home")
	must(t, os.Mkdir(home, 0o755))
	must(t, os.Chown(home, other, other))
	moved := filepath.Join(home, "moved")
	must(t, os.Symlink(real, moved))
	theirs := filepath.Join(root, "theirs")
	must(t, os.Symlink(real, theirs))
	must(t, os.Lchown(theirs, other, other))
	for _, link := range []string{moved, theirs, filepath.Join(moved, "below")} {
		if _, err := Make(link); err == nil || !strings.Contains(err.Error(), "not followed") {
			t.Errorf("%s: %v", link, err)
		}
	}

	// Links inside an open folder are not followed either.
	folder, err = Open(home)
	must(t, err)
	if _, err := Sub(folder, "moved"); err == nil {
		t.Error("a link was followed")
	}
	must(t, os.Symlink("sub", filepath.Join(home, "inside")))
	sub, err := Sub(folder, "sub")
	must(t, err)
	if _, err := Sub(folder, "inside"); err == nil {
		t.Error("a link was followed")
	}
	must(t, Give(sub, other, other))
	uid, gid, err := Owner(sub)
	if err != nil || uid != other || gid != other {
		t.Error(uid, gid, err)
	}
	must(t, os.Chown(filepath.Join(home, "sub"), other-1, other))
	if err := Give(sub, other, other); err == nil {
		t.Error("a folder of somebody else was given away")
	}
}

func TestAFileIsNotWrittenThroughALink(t *testing.T) {
	root := t.TempDir()
	precious := filepath.Join(root, "precious")
	must(t, os.WriteFile(precious, []byte("precious"), 0o600))
	for _, name := range []string{"file", "file.part"} {
		must(t, os.Symlink(precious, filepath.Join(root, name)))
	}
	folder, err := Open(root)
	must(t, err)
	must(t, Replace(folder, "file", "file.part", []byte("text")))
	text, err := os.ReadFile(precious)
	if err != nil || string(text) != "precious" {
		t.Error(string(text), err)
	}
	text, err = os.ReadFile(filepath.Join(root, "file"))
	if err != nil || string(text) != "text" {
		t.Error(string(text), err)
	}
}
